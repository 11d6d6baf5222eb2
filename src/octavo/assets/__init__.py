"""The model inside the package: what octavo answers with when it is given none."""

from __future__ import annotations

from pathlib import Path

BUILT_IN_MODEL = "octavo-demo"
BUILT_IN_DRAFT = "octavo-demo-draft"
BUILT_IN_TOOLS = "octavo-demo-tools"


def built_in_model_path() -> Path:
    """Return the directory of the built-in model."""
    return Path(__file__).parent / "demo"


def built_in_tools_path() -> Path:
    """Return the directory of its sibling that was taught to call tools, too."""
    return Path(__file__).parent / "demo-tools"


def built_in_draft_path() -> Path:
    """Return the directory of its much smaller sibling with the same tokenizer, made for drafting."""
    return Path(__file__).parent / "demo-draft"
