"""Read the arguments of a call, as a model wrote them, as an object. Nothing that the model wrote is dropped."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic_core

from octavo.engine.json_recovery import recover_object

_NO_VALUE = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*("\s*(:\s*)?)?)?\Z')  # an object cut off before its first value
UNREADABLE_KEY = "arguments"
"""The key under which a chat template receives arguments that are not an object."""


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a complete call; None if the text is not an object and cannot be repaired to one.

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
    """Return the arguments of any call as an object, the form that chat templates need.

    So a client can send a call of an answer back unchanged. A call that was cut off has the arguments that arrived,
    including the beginning of the last string. A text that is not an object becomes the value of `UNREADABLE_KEY`, so
    that the model sees its own text instead of a call without arguments.
    """
    whole = parse_arguments(text)
    if whole is not None:
        return whole
    begun = begun_arguments(text, with_last_string=True)
    return begun if begun or _NO_VALUE.match(text) else {UNREADABLE_KEY: text}


def begun_arguments(text: str, *, with_last_string: bool = False) -> dict[str, Any]:
    """Return the complete members of arguments that were cut off; {} if the text does not begin an object.

    with_last_string: include a last string that is incomplete. Clients that parse a stream leave it out.
    """
    try:
        begun = pydantic_core.from_json(
            text, allow_partial="trailing-strings" if with_last_string else True, allow_inf_nan=False
        )
    except ValueError:
        return {}
    return begun if isinstance(begun, dict) else {}
