"""Forbid further properties in objects that have `properties`, unless the schema mentions further properties.

By default, JSON Schema allows further properties. A small model would invent properties without end.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output.references import resolve

OBJECT_KEYWORDS = frozenset(
    (
        "additionalProperties",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedProperties",
    )
)
_DECIDING = frozenset(("additionalProperties", "const", "enum", "patternProperties", "propertyNames"))


MAX_MERGED = 50_000  # about 20 ms


class MergeBudget:
    """Limits the number of merged parts."""

    def __init__(self) -> None:
        self._left = MAX_MERGED

    def take(self, amount: int) -> None:
        """Count merged parts. Raises `RequestError` above the limit."""
        self._left -= amount
        if self._left < 0:
            raise RequestError(
                f"allOf, anyOf, oneOf and $ref of the schema merge more than {MAX_MERGED} properties and schemas in "
                "all; write fewer options, or shorter ones"
            )


class Merged:
    """The combined constraints of several schemas on one object.

    least: Minimum number of properties. has_properties: True if a schema names properties or forbids unevaluated
    properties. is_decided: True if a schema allows or forbids further properties.
    """

    def __init__(self, budget: MergeBudget) -> None:
        self._budget = budget
        self.names: dict[str, None] = {}
        self.least = 0
        self.has_properties = False
        self.is_decided = False
        self._referred: set[str] = set()

    def copy(self) -> Merged:
        """Return a copy."""
        self._budget.take(len(self.names) + 1)
        other = copy(self)
        other.names, other._referred = dict(self.names), set(self._referred)  # noqa: SLF001
        return other

    def add(self, schema: Any, root: dict[str, Any]) -> None:
        """Add the constraints of a schema, its references and its options."""
        left = [schema]
        while left:
            part = left.pop()
            if not isinstance(part, dict):
                continue
            self._add_properties(part)
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in self._referred:
                self._referred.add(reference)
                left.append(resolve(reference, root))
            for key in ("allOf", "anyOf", "oneOf"):
                left += part[key] if isinstance(part.get(key), list) else ()

    def _add_properties(self, schema: dict[str, Any]) -> None:
        self._budget.take(len(schema))
        properties, required, least = (schema.get(key) for key in ("properties", "required", "minProperties"))
        if isinstance(properties, dict):
            self._budget.take(len(properties))
            self.has_properties = True
            self.names |= dict.fromkeys(properties)
        if isinstance(required, list):
            self._budget.take(len(required))
            self.names |= dict.fromkeys(name for name in required if isinstance(name, str))
        if isinstance(least, int):
            self.least = max(self.least, least)
        closes = schema.get("unevaluatedProperties") is False
        self.has_properties = self.has_properties or closes
        self.is_decided = (
            self.is_decided or bool(_DECIDING & schema.keys()) or ("unevaluatedProperties" in schema and not closes)
        )

    @property
    def is_closable(self) -> bool:
        """True if `close` forbids further properties."""
        return self.has_properties and not self.is_decided and self.least <= len(self.names)

    def close(self, schema: Any) -> Any:
        """Return the schema. If closable, an added `allOf` member forbids further properties."""
        if not self.is_closable or not isinstance(schema, dict):
            return schema
        self._budget.take(len(self.names))
        closing = {"properties": {name: {} for name in self.names}, "additionalProperties": False}
        given = schema.get("allOf")
        found = {**schema, "allOf": [*(given if isinstance(given, list) else ()), closing]}
        found.pop("unevaluatedProperties", None)
        return found


def closed(schema: dict[str, Any], found: Any) -> Any:
    """Return `found`, if possible without further properties. found: `schema` with rewritten properties."""
    merged = Merged(MergeBudget())
    merged.add(schema, schema)
    if not merged.is_closable or not isinstance(found, dict):
        return found
    properties = found.get("properties")
    named = properties if isinstance(properties, dict) else {}
    missing: dict[str, Any] = {name: {} for name in merged.names if name not in named}
    result = {**found, "properties": {**named, **missing}, "additionalProperties": False}
    result.pop("unevaluatedProperties", None)
    return result
