"""The models inside the package."""

from __future__ import annotations

from pathlib import Path

BUILT_IN_MODEL = "octavo-demo"
BUILT_IN_DRAFT = "octavo-demo-draft"  # made for drafting, with the same tokenizer


def built_in_path(name: str) -> Path | None:
    """Return a built-in model's directory, else None."""
    paths = {BUILT_IN_MODEL: built_in_model_path, BUILT_IN_DRAFT: built_in_draft_path}
    return paths[name]() if name in paths else None


def built_in_model_path() -> Path:
    """Return the built-in model's directory."""
    return Path(__file__).parent / "demo"


def built_in_draft_path() -> Path:
    """Return the draft model's directory."""
    return Path(__file__).parent / "demo-draft"
