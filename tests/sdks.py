"""Packages that take seconds to import, imported when a test first uses them.

Each process of pytest-xdist collects all tests and runs a part of them; most processes never need these.
"""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """A module that is imported at the first access to one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every object in a test file whether it is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic = LateModule("anthropic")
compressed_tensors = LateModule("compressed_tensors")
ollama = LateModule("ollama")
openai = LateModule("openai")
transformers = LateModule("transformers")
