"""Parse the arguments of a model's tool call."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic_core

from octavo.engine.json_recovery import recover_object

_NO_VALUE = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*("\s*(:\s*)?)?)?\Z')  # an object cut off before its first value
UNREADABLE_KEY = "arguments"
"""`read_arguments` uses this key for text that is no object."""


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a complete call, and repair syntax errors. Return None if the text is no object."""
    if not text.strip():
        return {}
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        found = recover_object(text.strip()) if text.lstrip().startswith("{") else None
        value = None if found is None else json.loads(found[0])
    return value if isinstance(value, dict) else None


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a complete or cut-off call as an object for chat templates.

    For a cut-off call, return the arguments that arrived, including an incomplete last string. Text that is no object
    becomes the value of `UNREADABLE_KEY`.
    """
    whole = parse_arguments(text)
    if whole is not None:
        return whole
    begun = begun_arguments(text, with_last_string=True)
    return begun if begun or _NO_VALUE.match(text) else {UNREADABLE_KEY: text}


def begun_arguments(text: str, *, with_last_string: bool = False) -> dict[str, Any]:
    """Return the complete members of cut-off arguments, or {}.

    with_last_string: True to include an incomplete last string.
    """
    try:
        begun = pydantic_core.from_json(
            text, allow_partial="trailing-strings" if with_last_string else True, allow_inf_nan=False
        )
    except ValueError:
        return {}
    return begun if isinstance(begun, dict) else {}
