"""The models inside the package: what octavo answers with when it is given none, and what drafts for it."""

from __future__ import annotations

from pathlib import Path

BUILT_IN_MODEL = "octavo-demo"
BUILT_IN_DRAFT = "octavo-demo-draft"  # much smaller, with the same tokenizer, made for drafting


def built_in_path(name: str) -> Path | None:
    """Return the directory of a model inside the package; None for any other name."""
    paths = {BUILT_IN_MODEL: built_in_model_path, BUILT_IN_DRAFT: built_in_draft_path}
    return paths[name]() if name in paths else None


def built_in_model_path() -> Path:
    """Return the directory of the built-in model."""
    return Path(__file__).parent / "demo"


def built_in_draft_path() -> Path:
    """Return the directory of the one that drafts for it."""
    return Path(__file__).parent / "demo-draft"
