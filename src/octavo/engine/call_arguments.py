"""The arguments of a call as a model wrote them, read as an object: nothing that was written is left out."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic_core

from octavo.engine.json_recovery import recover_object

_NO_VALUE = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*("\s*(:\s*)?)?)?\Z')  # of an object: a name at most
UNREADABLE_KEY = "arguments"
"""The key under which a chat template is given arguments that are no object."""


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that is whole; None for a text that is no object and cannot be repaired to one.

    An empty text is a call without arguments.
    """
    if not text.strip():
        return {}
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        found = recover_object(text.strip()) if text.lstrip().startswith("{") else None
        value = None if found is None else json.loads(found[0])
    return value if isinstance(value, dict) else None


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of any call for a chat template, which wants an object.

    A client can send a call of an answer back unchanged. A call that was cut off has the arguments
    that came, the last string as far as it came. A text that is no object at all is the value of `UNREADABLE_KEY`: the
    model sees what it wrote, not a call without arguments.
    """
    whole = parse_arguments(text)
    if whole is not None:
        return whole
    begun = begun_arguments(text, with_last_string=True)
    return begun if begun or _NO_VALUE.match(text) else {UNREADABLE_KEY: text}


def begun_arguments(text: str, *, with_last_string: bool = False) -> dict[str, Any]:
    """Return the complete members of arguments that were cut off; {} if the text does not begin an object.

    with_last_string: the last value may be half a string; clients that read a stream as it comes leave it out.
    """
    try:
        begun = pydantic_core.from_json(
            text, allow_partial="trailing-strings" if with_last_string else True, allow_inf_nan=False
        )
    except ValueError:
        return {}
    return begun if isinstance(begun, dict) else {}
