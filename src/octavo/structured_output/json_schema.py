"""Refuses JSON schemas that are too large."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output.merging import properties_of

MAX_OPTIONAL_PROPERTIES = 2000  # per object; llguidance needs four states per property
_VALUES = {"const", "enum", "default", "examples"}
DEFINITIONS = frozenset(("$defs", "definitions"))
NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}


def refuse_large_objects(schema: str | dict[str, Any], kind: str, parameter: str | None) -> None:
    """Raise `RequestError` if an object has too many optional properties. Ignores text that is not JSON."""
    try:
        left: list[Any] = [json.loads(schema) if isinstance(schema, str) else schema]
    except (ValueError, RecursionError):
        return
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, dict):
            continue
        num_optional = _num_optional(part)
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            raise RequestError(
                f"{kind}: an object of the schema has {num_optional} properties that are not required; the limit is "
                f"{MAX_OPTIONAL_PROPERTIES}: require some of them, or put them into several objects",
                parameter=parameter,
            )
        for key, value in part.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                left += value.values()
            elif key not in _VALUES:
                left.append(value)


def _num_optional(schema: dict[str, Any]) -> int:
    return sum(not is_required for *_, is_required in properties_of(schema))
