"""Find the part of a JSON schema that llguidance refuses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.structured_output.json_schema import DEFINITIONS
from octavo.structured_output.references import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Keyword that llguidance ignores. Its value names the request's field that contains the schema.
FIELD = "x-octavo-field"
# If a schema has this keyword, unsupported keywords are ignored.
LENIENT = "x-octavo-lenient"
_SCHEMA = re.compile(r"%json (?=\{)")
_NAMED = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_ONE = ("additionalItems", "additionalProperties", "contains", "items", "propertyNames", "unevaluatedItems")
_MAX_TRIED_CHARS = 1 << 19  # total size of the schemas compiled to find a fault
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_MAX_PATTERN_CHARS = 200
_MAX_FIELD_CHARS = 100


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """A part of a schema that cannot be compiled.

    place: JSON pointer. field: The request's field that contains the schema.
    """

    place: str
    message: str
    field: str | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def find_fault(schema: dict[str, Any], check: Callable[[dict[str, Any]], str | None]) -> SchemaFault | None:
    """Return the fault of the smallest invalid part, or None. check: Returns a schema's error, or None."""
    message = check(schema)
    if message is None:
        return None
    definitions = {key: schema[key] for key in (*DEFINITIONS, LENIENT) if key in schema}
    field = schema.get(FIELD)
    field = field[:_MAX_FIELD_CHARS] if isinstance(field, str) else None
    part, place, seen, left = schema, "#", {"#"}, _MAX_TRIED_CHARS
    while left >= 0:
        for child_place, child in _children(part, place, schema):
            whole = {**definitions, **child}
            left -= len(json.dumps(whole))
            if left < 0:
                break
            if child_place not in seen and (found := check(whole)) is not None:
                part, place, message = child, child_place, found
                seen.add(place)
                break
        else:
            break
    return SchemaFault(place, _explained(message, part), field)


def find_fault_in_grammar(grammar: str, check: Callable[[dict[str, Any]], str | None]) -> SchemaFault | None:
    """Return the first fault of a schema inside a Lark grammar, or None."""
    decoder = json.JSONDecoder()
    for found in _SCHEMA.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, found.end())
        except ValueError:
            continue
        if (fault := find_fault(schema, check)) is not None:
            return fault
    return None


def _children(schema: dict[str, Any], place: str, root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            for name, each in named.items():
                if isinstance(each, dict):
                    yield f"{place}/{key}/{_escaped(name)}", each
    for key in _LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{place}/{key}/{index}", each) for index, each in enumerate(listed) if isinstance(each, dict))
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield f"{place}/{key}", schema[key]
    if isinstance(reference := schema.get("$ref"), str) and isinstance(named := resolve(reference, root), dict):
        yield reference, named


def place_of_pattern(schema: dict[str, Any], pattern: str) -> str:
    """Return a pattern's JSON pointer in the schema, or "#" if the pattern is missing."""
    left: list[tuple[str, Any]] = [("#", schema)]
    while left:
        place, part = left.pop(0)
        if isinstance(part, list):
            left += ((f"{place}/{index}", each) for index, each in enumerate(part))
        elif isinstance(part, dict):
            if part.get("pattern") == pattern:
                return place
            left += ((f"{place}/{_escaped(name)}", each) for name, each in part.items())
    return "#"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _explained(message: str, schema: dict[str, Any]) -> str:
    if found := _UNSUPPORTED.fullmatch(message):
        return f"the keywords {found[1]} are not supported"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and "regex" in message:
        return f"the pattern `{pattern[:_MAX_PATTERN_CHARS]}` cannot be used: {reason_of(message)}"
    return reason_of(message)


def reason_of(message: str) -> str:
    """Return the first line of llguidance's error. For an invalid regular expression, add the reason."""
    head, _, rest = message.strip().partition("\n")
    reason = rest.rpartition("error: ")[2].partition("\n")[0] if "regex parse error" in head else ""
    return f"{head.rpartition('regex parse error')[0]}{reason}" if reason else head
