"""Merge the constraints that `$ref`, `allOf`, `anyOf` and `oneOf` of a JSON schema put on one value.

References point into `root`, the whole schema.
"""

from __future__ import annotations

from typing import Any

from octavo.structured_output.references import resolve

MAX_OPTIONS = 16  # per object
MAX_EXPANDED = 512  # nested schemas
_OPTIONS = ("anyOf", "oneOf")
_NAMING = frozenset(("patternProperties", "propertyNames"))
_MERGED = ("$ref", "allOf", *_OPTIONS)
_LEAST = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
_MOST = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
_NOTES = frozenset(("$comment", "$schema", "default", "deprecated", "description", "examples", "title"))


def is_merged(schema: dict[str, Any]) -> bool:
    """Return True if the schema has no `$ref`, `allOf`, `anyOf` or `oneOf`."""
    return not any(key in schema for key in _MERGED)


def merged(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Merge a schema with the target of its `$ref` and the members of its `allOf`.

    `anyOf`, `oneOf` and properties' schemas are not merged. Keywords that cannot be combined become members of an
    `allOf`. Above MAX_EXPANDED members, the result is {}, which allows anything.
    """
    found = dict[str, Any]()
    left, referred, num_seen = [schema], set[str](), 0
    while left:
        part = left.pop(0)
        num_seen += 1
        if num_seen > MAX_EXPANDED:
            return {}
        if not isinstance(part, dict):
            if part is False:
                found["not"] = {}
            continue
        if not left and not found and is_merged(part):
            return part
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in referred:
            referred.add(reference)
            left.insert(0, resolve(reference, root))
        left += _list(part, "allOf")
        for key, value in part.items():
            if key not in {"$ref", "allOf"}:
                _add(found, key, value)
    return found


def alternatives(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one merged schema for each option of `anyOf` and `oneOf`.

    Above MAX_OPTIONS options, return one schema with all options' properties.
    """
    left, found = [merged(schema, root)], list[dict[str, Any]]()
    num_seen = 0
    while left:
        part = left.pop(0)
        num_seen += 1
        key = next((key for key in _OPTIONS if isinstance(part.get(key), list) and part[key]), None)
        if key is None:
            found.append(part)
        else:
            rest = {name: value for name, value in part.items() if name != key}
            options = [merged({**rest, "allOf": [*_list(rest, "allOf"), option]}, root) for option in part[key]]
            left = [*(each for each in options if "not" not in each or each["not"]), *left]
        if num_seen + len(left) > MAX_OPTIONS:
            return [_union([*found, *left], root)]
    return found or [{}]


def is_small(schema: Any, root: dict[str, Any]) -> bool:
    """Return True if a fully expanded schema has at most MAX_EXPANDED nested schemas."""
    left, num_seen = [schema], 0
    while left and num_seen <= MAX_EXPANDED:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        num_seen += 1
        left += [each for key in ("allOf", *_OPTIONS) for each in _list(part, key)]
        properties = part.get("properties")
        left += properties.values() if isinstance(properties, dict) else ()
        left.append(part.get("items"))
        if isinstance(reference := part.get("$ref"), str):
            left.append(resolve(reference, root))
    return num_seen <= MAX_EXPANDED


def properties_of(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return (name, schema, True if required) for each of a merged schema's properties."""
    named, required = schema.get("properties"), set(_required(schema))
    return [(key, part, key in required) for key, part in named.items()] if isinstance(named, dict) else []


def _required(schema: dict[str, Any]) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    given = schema.get(key)
    return given if isinstance(given, list) else []


def _union(parts: list[dict[str, Any]], root: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, list[Any]] = {}
    required: list[str] | None = None
    is_closed, num_seen = True, 0
    left = [(part, True) for part in parts]
    while left and num_seen <= MAX_EXPANDED:
        part, is_whole = left.pop(0)
        num_seen += 1
        for name, value, _ in properties_of(part):
            schemas = properties.setdefault(name, [])
            if value not in schemas:
                schemas.append(value)
        if is_whole:
            names = _required(part)
            required = names if required is None else [name for name in required if name in names]
        is_closed = is_closed and not is_open(part)
        left += [(merged(option, root), False) for key in _OPTIONS for option in _list(part, key)]
    return {
        "type": "object",
        "properties": {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in properties.items()},
        "required": required or [],
        **({} if is_closed else {"additionalProperties": True}),
    }


def is_open(schema: dict[str, Any]) -> bool:
    """Return True if an object may have properties that its merged schema does not name.

    Unlike in JSON Schema, an object with `properties` and without `additionalProperties` is closed.
    """
    others = schema.get("additionalProperties")
    if others is not None:
        return others is not False
    if schema.get("unevaluatedProperties") is False:
        return False
    return not isinstance(schema.get("properties"), dict) or not _NAMING.isdisjoint(schema)


def _add(found: dict[str, Any], key: str, value: Any) -> None:
    given = found.get(key)
    if key not in found or given == value:
        found[key] = value
    elif key in _NOTES or key == "$defs":
        return
    elif key == "properties" and isinstance(given, dict) and isinstance(value, dict):
        found[key] = given | {
            name: {"allOf": [given[name], each]} if name in given and given[name] != each else each
            for name, each in value.items()
        }
    elif key == "required" and isinstance(given, list) and isinstance(value, list):
        found[key] = [*given, *(name for name in value if name not in given)]
    elif key == "type":
        found[key] = _common_types(given, value)
    elif key == "enum" and isinstance(given, list) and isinstance(value, list):
        found[key] = [each for each in given if each in value]
    elif key in _LEAST | _MOST and _is_number(given) and _is_number(value):
        found[key] = max(given, value) if key in _LEAST else min(given, value)
    elif key == "additionalProperties" and False in {given is not False, value is not False}:
        found[key] = False
    else:
        found["allOf"] = [*_list(found, "allOf"), {key: value}]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _common_types(one: Any, other: Any) -> Any:
    first, second = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    if not isinstance(first, list) or not isinstance(second, list):
        return one
    common = [kind for kind in first if kind in second]
    if "number" in first and "integer" in second and "integer" not in common:
        common.append("integer")
    if "integer" in first and "number" in second and "integer" not in common:
        common.append("integer")
    return common[0] if len(common) == 1 else common
