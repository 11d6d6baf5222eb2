"""Rewrites a JSON schema for llguidance, with the meaning that clients expect.

The result allows no value that the original schema forbids, with two exceptions. Unknown formats are not checked. A
value may match several options of `oneOf`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from octavo.structured_output.closed_objects import OBJECT_KEYWORDS, MergeBudget, Merged, closed
from octavo.structured_output.json_schema import DEFINITIONS, MAX_OPTIONAL_PROPERTIES, NAMED_SCHEMAS
from octavo.structured_output.lookahead import without_lookahead
from octavo.structured_output.references import resolve

logger = logging.getLogger(__name__)
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
_MAX_NAMED = 100
_MAX_NAME_CHARS = 64
_ONE = ("additionalItems", "additionalProperties", "contains", "items", "propertyNames", "unevaluatedItems")
_SEVERAL = ("items", "prefixItems")
_BRANCHES = ("anyOf", "oneOf")
_KNOWN_DIALECTS = "json-schema.org/"


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema to compile. The argument is not changed.

    * An object with `properties` and without `additionalProperties` is closed, which forbids further properties.
      Objects with `patternProperties`, or with fewer named properties than `minProperties`, stay open. `$ref`,
      `allOf` and `anyOf` are taken into account.
    * An unknown `format` is dropped.
    * If possible, a `pattern` with lookahead becomes several patterns, and `propertyNames` becomes `patternProperties`
      or `properties`.

    Raises `RecursionError` if the schema is nested too deep, and `RequestError` if merges are too large.
    """
    return _Rewriter(schema).whole()


class _Rewriter:
    """Closes each value's schema.

    If `allOf`, or `$ref` with other keywords, merges several schemas for one value, only the merged schema is closed.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._names: dict[tuple[int, bool], str] = {}  # by id() of the target, and `is_open`
        self._left: list[tuple[str, Any, bool]] = []
        self._budget = MergeBudget()

    def whole(self) -> dict[str, Any]:
        found = self._closed(self._root)
        if not isinstance(found, dict):
            found = {"not": {}}  # a schema that llguidance refuses
        added = {}
        while self._left:
            name, target, is_open = self._left.pop()
            added[name] = self._open(target) if is_open else self._closed(target)
        if added:
            given = found.get("$defs")
            found = {**found, "$defs": {**(given if isinstance(given, dict) else {}), **added}}
        return found

    def _closed(self, schema: Any) -> Any:
        schema = _mended(schema) if isinstance(schema, dict) else schema
        if not isinstance(schema, dict):
            return schema
        applied = [key for key in ("$ref", "allOf", *_BRANCHES) if key in schema]
        if not applied:
            return closed(schema, self._open(schema))
        if len(applied) == 1 and not OBJECT_KEYWORDS & schema.keys():
            members = schema[applied[0]]
            if applied[0] != "allOf" or (isinstance(members, list) and len(members) == 1):
                return self._rewritten(schema, is_open=False)
        branches = [key for key in _BRANCHES if key in applied]
        base = Merged(self._budget)
        base.add({key: value for key, value in schema.items() if branches != [key]}, self._root)
        found = self._rewritten(schema, is_open=True)
        if not isinstance(found, dict):
            return found
        options = schema[branches[0]] if len(branches) == 1 else None
        if not isinstance(options, list):
            return base.close(found)
        merges = [base.copy() for _ in options]
        for merged, option in zip(merges, options, strict=True):
            merged.add(option, self._root)
        found[branches[0]] = [merged.close(option) for merged, option in zip(merges, found[branches[0]], strict=True)]
        return found

    def _open(self, schema: Any) -> Any:
        return self._rewritten(schema, is_open=True)

    def _rewritten(self, schema: Any, *, is_open: bool) -> Any:
        schema = _mended(schema) if isinstance(schema, dict) else schema
        if not isinstance(schema, dict):
            return schema
        member = self._open if is_open else self._closed
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                found[key] = {name: self._closed(each) for name, each in value.items()}
            elif key in _SEVERAL and isinstance(value, list):
                found[key] = [self._closed(each) for each in value]
            elif key in _ONE:
                found[key] = self._closed(value)
            elif key in ("allOf", *_BRANCHES) and isinstance(value, list):
                found[key] = [member(each) for each in value]
            elif key == "$ref" and isinstance(value, str):
                found[key] = self._reference(value, is_open=is_open)
            else:
                found[key] = value
        return _with_patterns(found)

    def _reference(self, reference: str, *, is_open: bool) -> str:
        target = resolve(reference, self._root)
        if not isinstance(target, dict):
            return reference
        container, _, name = reference.removeprefix("#/").partition("/")
        if not is_open and (reference == "#" or (container in DEFINITIONS and "/" not in name)):
            return reference
        key = id(target), is_open
        if key not in self._names:
            self._names[key] = self._new_name(name.rpartition("/")[2])
            self._left.append((self._names[key], target, is_open))
        return f"#/$defs/{self._names[key]}"

    def _new_name(self, wanted: str) -> str:
        stem = "".join(char for char in wanted if char.isascii() and (char.isalnum() or char in "_-.")) or "root"
        given = self._root.get("$defs")
        taken = {*self._names.values(), *(given if isinstance(given, dict) else ())}
        return next(name for count in range(len(taken) + 1) if (name := f"{stem}.{count}") not in taken)


def _mended(schema: dict[str, Any]) -> dict[str, Any] | bool:
    """Drop or replace keywords that llguidance needlessly refuses. Return False if no value can match."""
    found = dict(schema)
    if found.get("not") in ({}, True) and "not" in found:
        return False
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        _note_format(found.pop("format"))
    if _KNOWN_DIALECTS not in str(found.get("$schema", _KNOWN_DIALECTS)):
        del found["$schema"]  # llguidance refuses unknown dialects, such as OpenAPI's
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(is_exclusive := found.get(exclusive), bool):  # OpenAPI 3.0
            del found[exclusive]
            if is_exclusive and bound in found:
                found[exclusive] = found.pop(bound)
    for key in ("dependencies", "dependentRequired", "dependentSchemas", "uniqueItems"):
        if key in found and not found[key]:
            del found[key]
    if found.get("unevaluatedProperties") in (True, {}) and "unevaluatedProperties" in found:
        del found["unevaluatedProperties"]
        found.setdefault("additionalProperties", True)
    _mend_names(found)
    return found


def _mend_names(schema: dict[str, Any]) -> None:
    names = schema.get("propertyNames")
    if names in (True, {}, {"type": "string"}):  # names are always strings
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or schema.get("properties") or schema.get("patternProperties"):
        return
    value = schema.get("additionalProperties", True)
    listed, pattern = [names["const"]] if "const" in names else names.get("enum"), names.get("pattern")
    if (
        isinstance(listed, list)
        and len(listed) <= MAX_OPTIONAL_PROPERTIES
        and not names.keys() - {"type", "enum", "const"}
    ):
        schema["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif isinstance(pattern, str) and not names.keys() - {"type", "pattern"}:
        schema["patternProperties"] = {pattern: value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = schema.get("pattern")
    patterns = without_lookahead(pattern) if isinstance(pattern, str) else None
    if not patterns or (len(patterns) == 1 and patterns[0] == pattern):
        return schema
    given = schema.get("allOf")
    further = [{"pattern": each} for each in patterns[1:]]
    return {**schema, "pattern": patterns[0], "allOf": [*(given if isinstance(given, list) else ()), *further]}


@functools.cache
def _named_formats() -> set[str]:
    return set()


def _note_format(name: str) -> None:
    named, shown = _named_formats(), name[:_MAX_NAME_CHARS]
    if shown not in named and len(named) < _MAX_NAMED:
        named.add(shown)
        logger.warning("the format %r of a JSON schema is unknown: any string is accepted", shown)
