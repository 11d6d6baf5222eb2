"""The models inside the package: what octavo answers with when it is given none, and its siblings."""

from __future__ import annotations

from pathlib import Path

BUILT_IN_MODEL = "octavo-demo"
BUILT_IN_TOOLS = "octavo-demo-tools"  # taught to call tools, too
BUILT_IN_DRAFT = "octavo-demo-draft"  # much smaller, with the same tokenizer, made for drafting


def built_in_path(name: str) -> Path | None:
    """Return the directory of a model inside the package; None for any other name."""
    if name not in {BUILT_IN_MODEL, BUILT_IN_TOOLS, BUILT_IN_DRAFT}:
        return None
    return Path(__file__).parent / name.removeprefix("octavo-")


def built_in_model_path() -> Path:
    """Return the directory of the built-in model."""
    return Path(__file__).parent / "demo"


def built_in_draft_path() -> Path:
    """Return the directory of the one that drafts for it."""
    return Path(__file__).parent / "demo-draft"
