"""Arguments that are written as bare text: what their types say they are, as JSON."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any, NoReturn

from octavo.engine.json_recovery import recover_object
from octavo.engine.python_literals import NotALiteralError, literal_json
from octavo.errors import RequestError
from octavo.sampling_params import MAX_GRAMMAR_CHARS
from octavo.structured_output.lark import lark_json
from octavo.structured_output.lookahead import without_lookahead
from octavo.structured_output.schema_faults import FIELD

_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_MAX_SHOWN_CHARS = 200
_ALL_TYPES = frozenset(_TYPES.values())
_VALUES = frozenset({"const", "default", "enum", "examples"})
_OPENS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})
_ANCHOR = re.compile(r"(?<!\\)(\\\\)*\$$")  # a dollar at the end that is not escaped
_IS_PLAIN = re.compile(r"[\w\s.,:;!?%+-]*")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class UnreadableError(Exception):
    """A text is no value of its types, and no plain words."""


def property_of(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of one argument, {} for one that none is known of; references stand for what they name."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else {}


def takes_others(schema: dict[str, Any]) -> bool:
    """Return whether an object may have properties that its schema does not name.

    A schema with `properties` and without `additionalProperties` is read as closed, as models write such calls.
    """
    others = schema.get("additionalProperties")
    if others is not None:
        return others is not False
    return not isinstance(schema.get("properties"), dict) or not _OPENS.isdisjoint(schema)


def known_keys(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the names that properties of an object may have; None for any."""
    properties = schema.get("properties")
    if takes_others(schema):
        return None
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def part_of(schema: dict[str, Any], root: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the schema of values of one type that another schema allows, {} where that does not say.

    References stand for what they name.
    """
    left, referred = list[Any]([schema]), set[str]()
    while left:
        part = left.pop(0)
        if not isinstance(part, dict):
            continue
        if isinstance(reference := part.get("$ref"), str):
            if reference not in referred:  # once: they may point at each other
                referred.add(reference)
                left.insert(0, _referred(reference, root))
            continue
        options, own = part.get("anyOf") or part.get("oneOf"), _own_types(part)
        if isinstance(options, list) and not own:
            left = [*options, *left]
        elif kind in own or not own:
            return part
    return {}


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """Return the JSON types that values of a schema may have. root: where its references point."""
    found, left, referred = set[str](), [schema], set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            return _ALL_TYPES
        if isinstance(reference := part.get("$ref"), str):
            if reference not in referred:  # once: they may point at each other
                referred.add(reference)
                left.append(_referred(reference, root))
            continue
        options = part.get("anyOf") or part.get("oneOf")
        if own := _own_types(part):
            found |= own
        elif isinstance(options, list):
            left += options
        else:
            return _ALL_TYPES
    return frozenset(found) or _ALL_TYPES


def _own_types(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema itself says; none where it says none."""
    kinds = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(kinds, str | list):
        return {each for each in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(each, str)} & _ALL_TYPES
    return {_TYPES[type(value)] for value in values} if isinstance(values, list) else set()


def is_text(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether an argument is a string whatever its text looks like."""
    return types_of(schema, root) == {"string"}


def value_text(text: str, schema: dict[str, Any], root: dict[str, Any]) -> str | None:
    """Return the JSON of an argument that was written as this text: JSON of a type that it may have, else a string.

    Python's literals are accepted unless a string is expected. Words that are no value of the types are a string: the
    client answers it. Returns None for an empty text that is no string: the argument is left out. Raises
    `UnreadableError` for a text with other characters, such as brackets, that is no value: it has a slip.
    """
    kinds = types_of(schema, root)
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    if not bare and "string" not in kinds:
        return None
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _WORDS.get(bare.lower(), text)
        bare = json.dumps(value, ensure_ascii=False)
        if value is text and text.strip().startswith(("[", "{", "(")) and kinds & {"array", "object"}:
            value, bare = _container(text.strip(), value, bare)
    kind = _TYPES[type(value)]
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return bare
    if "string" not in kinds and value is text and not _IS_PLAIN.fullmatch(text):
        raise UnreadableError
    return bare if "string" not in kinds else json.dumps(text, ensure_ascii=False)


def _container(text: str, value: Any, written: str) -> tuple[Any, str]:
    """Return the value and the JSON of a list or object with slips; the given text if it cannot be read."""
    found = [recovered[0]] if text.startswith("{") and (recovered := recover_object(text)) else []
    with contextlib.suppress(NotALiteralError):
        found.append(literal_json(text))
    values = [json.loads(each) for each in found]
    return (values[0], found[0]) if values and values[0] == values[-1] else (value, written)


class LookaheadError(RequestError):
    """A pattern looks ahead, and the form of the calls has no other spelling of it."""

    def __init__(self, pattern: str) -> None:
        shown = f"the pattern `{pattern[:_MAX_SHOWN_CHARS]}` looks ahead"
        super().__init__(f"{shown}, and this model's form of calls cannot check that: write it without")
        self.pattern = pattern


def text_pattern(schema: dict[str, Any]) -> str:
    """Return a regular expression of the strings of a schema. Raises `LookaheadError`."""
    wanted, least, most = schema.get("pattern"), schema.get("minLength"), schema.get("maxLength")
    if isinstance(wanted, str):
        rewriting = without_lookahead(wanted)
        if rewriting is None or len(rewriting) > 1:
            raise LookaheadError(wanted)
        is_anchored = _ANCHOR.search(wanted) is not None
        before, behind = ("" if wanted.startswith("^") else "(.|\\n)*"), ("" if is_anchored else "(.|\\n)*")
        inner = wanted.removeprefix("^").removesuffix("$" if is_anchored else "")
        inner = re.sub(r"\\?/", r"\\x{2f}", inner.replace("\n", "\\n"))
        return f"{before}({inner}){behind}"
    if isinstance(least, int) or isinstance(most, int):
        return f"(.|\\n){{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
    return "(.|\\n)*"


def json_of(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return how a grammar names JSON of a part of a schema: with what it refers to in the whole one, and no more.

    Raises `RequestError` for what is too long for any grammar.
    """
    definitions: dict[str, Any] = {}
    names, left = dict[int, str](), list[Any]()
    whole = _with_names(schema, root, names, left)
    while left:
        part = left.pop()
        definitions[names[id(part)]] = _with_names(part, root, names, left)
    if FIELD in root:  # errors of the compiler name it
        whole[FIELD] = root[FIELD]
    text = lark_json({**whole, "$defs": definitions} if definitions else whole)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"a part of a schema has {len(text)} characters with what it refers to")
    return text


def _with_names(schema: Any, root: dict[str, Any], names: dict[int, str], left: list[Any]) -> Any:
    """Return a schema whose references are to definitions. Mutated: names, of what is referred to; left, the new."""
    if isinstance(schema, list):
        return [_with_names(each, root, names, left) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: each if key in _VALUES else _with_names(each, root, names, left) for key, each in schema.items()}
    reference = schema.get("$ref")
    referred = _referred(reference, root) if isinstance(reference, str) and reference.startswith("#") else None
    if isinstance(referred, dict):
        if id(referred) not in names:  # however the reference is spelled
            names[id(referred)] = f"part{len(names)}"
            left.append(referred)
        told["$ref"] = f"#/$defs/{names[id(referred)]}"
    return told


def _referred(reference: str, root: Any) -> Any:
    """Return what a reference within a schema names; None where that is nothing."""
    for key in map(_unescaped, reference.removeprefix("#").split("/")[1:]):
        match root:
            case dict():
                root = root.get(key)
            case list() if key.isdecimal() and int(key) < len(root):
                root = root[int(key)]
            case _:
                return None
    return root


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
