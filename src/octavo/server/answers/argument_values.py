"""Arguments that are written as bare text: what their types say they are, as JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

_MAX_DEPTH = 8  # of references and alternatives in a schema
_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_ALL_TYPES = frozenset(_TYPES.values())
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def property_of(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of one argument, {} for one that none is known of; references stand for what they name."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else {}


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that values of a schema may have. root: where its references point."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _ALL_TYPES
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_referred(reference, root), root, depth + 1)
    kinds = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, str | list):
        named = {kinds} if isinstance(kinds, str) else {each for each in kinds if isinstance(each, str)}
    elif isinstance(values, list):
        named = {_TYPES[type(value)] for value in values}
    elif isinstance(options, list):
        named = {each for option in options for each in types_of(option, root, depth + 1)}
    else:
        named = set()
    return _ALL_TYPES & named or _ALL_TYPES


def is_text(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether an argument is a string whatever its text looks like."""
    return types_of(schema, root) == {"string"}


def value_text(text: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return the JSON of an argument that was written as this text: JSON of a type that it may have, else a string.

    Python's spelling of truth values and of nothing is understood.
    """
    kinds = types_of(schema, root)
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _WORDS.get(bare.lower(), text)
        bare = json.dumps(value, ensure_ascii=False)
    kind = _TYPES[type(value)]
    if kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds:
        return bare
    return json.dumps(text, ensure_ascii=False)


def _referred(reference: str, root: Any) -> Any:
    for key in reference.removeprefix("#/").split("/"):
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def definitions_of(root: dict[str, Any]) -> dict[str, Any]:
    """Return what a part of a schema needs of the whole one, for its references."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
