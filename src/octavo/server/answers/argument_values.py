"""Convert unquoted arguments to JSON, according to the schema.

In all functions, `root` is the schema in which `$ref` is resolved.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.engine.json_recovery import recover_object
from octavo.engine.python_literals import NotALiteralError, literal_json
from octavo.errors import RequestError
from octavo.sampling_params import MAX_GRAMMAR_CHARS
from octavo.structured_output.lark import lark_json
from octavo.structured_output.lookahead import without_lookahead
from octavo.structured_output.merging import alternatives, is_merged, is_open, merged, properties_of
from octavo.structured_output.references import resolve
from octavo.structured_output.schema_faults import FIELD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.server.answers.tool_format import Function

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
_ANY_TEXT = "(.|\\n)*"
_ANCHOR = re.compile(r"(?<!\\)(\\\\)*\$$")  # an unescaped final dollar
_IS_PLAIN = re.compile(r"[\w\s.,:;!?%+-]*")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class UnreadableError(Exception):
    """The schema allows no string, and the text is neither a value nor plain words."""


def property_of(parameters: dict[str, Any], name: str, root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a property, or {} if `parameters` has no such property.

    Different schemas in options of `anyOf` or `oneOf` are returned as an `anyOf`.
    """
    found = list[Any]()
    for each in [parameters] if is_merged(parameters) else alternatives(parameters, root):
        properties = each.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and schema not in found:
            found.append(schema)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def known_keys(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the allowed property names, or None if any name is allowed."""
    is_any = any(map(is_open, alternatives(schema, schema)))
    return None if is_any else frozenset(property_names(schema, schema))


def property_names(schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """Return all property names, including names in `$ref`, `anyOf` and `oneOf`."""
    return list(dict.fromkeys(name for each in alternatives(schema, root) for name, *_ in properties_of(each)))


def part_of(schema: dict[str, Any], root: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the schema's first option for values of type `kind`, or {}. kind: "object" or "array"."""
    for part in _parts(schema, root):
        types = _declared_types(part)
        if kind in types or (
            part and not types and ("properties" in part or "items" in part or _options(part) is None)
        ):
            return part
    return {}


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """Return the allowed JSON types."""
    found = set[str]()
    for part in _parts(schema, root):
        if types := _declared_types(part):
            found |= types
        elif _options(part) is None:
            return _ALL_TYPES
    return frozenset(found) or _ALL_TYPES


def _parts(schema: Any, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    left, seen = [schema], dict[int, Any]()
    while left:
        part = left.pop(0)
        if id(part) in seen:
            continue
        seen[id(part)] = part
        whole = merged(part, root)
        yield whole
        if not _declared_types(whole):
            left = [*(_options(whole) or ()), *left]


def _options(schema: dict[str, Any]) -> list[Any] | None:
    options = schema.get("anyOf") or schema.get("oneOf")
    return options if isinstance(options, list) else None


def _declared_types(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(kinds, str | list):
        return {each for each in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(each, str)} & _ALL_TYPES
    return {_TYPES[type(value)] for value in values} if isinstance(values, list) else set()


def is_text(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return True if the schema allows only strings."""
    return types_of(schema, root) == {"string"}


def value_text(text: str, schema: dict[str, Any], root: dict[str, Any]) -> str | None:
    """Return an argument's JSON, or None if the text is blank and the schema allows no string.

    The first matching rule applies:
    - If the schema allows only strings, the text becomes a string.
    - A JSON value or Python literal of an allowed type keeps its value.
    - If the schema allows strings, the text becomes a string.
    - A JSON value of a type that the schema does not allow is kept.
    - Plain words become a string, although the schema allows no string.
    - Any other text raises `UnreadableError`.
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
    """Return the repaired list or object, and its JSON.

    If the repair is impossible or ambiguous, return `value` and `written`.
    """
    found = [recovered[0]] if text.startswith("{") and (recovered := recover_object(text)) else []
    with contextlib.suppress(NotALiteralError):
        found.append(literal_json(text))
    values = [json.loads(each) for each in found]
    return (values[0], found[0]) if values and values[0] == values[-1] else (value, written)


class LookaheadError(RequestError):
    """The grammar cannot express a pattern's lookahead."""

    def __init__(self, pattern: str) -> None:
        shown = f"the pattern `{pattern[:_MAX_SHOWN_CHARS]}` looks ahead"
        super().__init__(f"{shown}, and this model's form of calls cannot check that: write it without")
        self.pattern = pattern


def text_lexeme(schema: dict[str, Any], ending: str = "") -> str:
    """Return a Lark lexeme for the strings that a merged schema allows.

    ending: Regular expression for the text after the string. Raises `LookaheadError`.
    """
    members = schema.get("allOf")
    parts = [schema, *(each for each in (members if isinstance(members, list) else ()) if isinstance(each, dict))]
    found = [expression for part in parts for expression in _expressions(part)] or [_ANY_TEXT]
    return " & ".join(f"/({each}){ending}/" if ending else f"/{each}/" for each in dict.fromkeys(found))


def _expressions(schema: dict[str, Any]) -> Iterator[str]:
    wanted, least, most = schema.get("pattern"), schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        yield f"(.|\\n){{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
    if not isinstance(wanted, str):
        return
    patterns = without_lookahead(wanted)
    if patterns is None:
        raise LookaheadError(wanted)
    for each in patterns:
        is_anchored = _ANCHOR.search(each) is not None
        before, after = ("" if each.startswith("^") else _ANY_TEXT), ("" if is_anchored else _ANY_TEXT)
        inner = each.removeprefix("^").removesuffix("$" if is_anchored else "")
        inner = re.sub(r"\\?/", r"\\x{2f}", inner.replace("\n", "\\n"))
        yield f"{before}({inner}){after}"


def schema_comment(function: Function) -> str:
    """Return a grammar comment with the schema of the parameters, or "" if the schema has no `pattern`.

    With the comment, `schema_faults` can name the request's field in errors of the grammar compiler.
    """
    written = lark_json(function.parameters)
    return f"// {written}" if '"pattern"' in written else ""


def json_of(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return a grammar expression for JSON that matches `schema`, with the definitions that `schema` refers to.

    Raises `RequestError` if the expression is too long for a grammar.
    """
    definitions: dict[str, Any] = {}
    names, left = dict[int, str](), list[Any]()
    whole = _with_names(schema, root, names, left)
    while left:
        part = left.pop()
        definitions[names[id(part)]] = _with_names(part, root, names, left)
    if FIELD in root:
        whole[FIELD] = root[FIELD]
    text = lark_json({**whole, "$defs": definitions} if definitions else whole)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"a part of a schema has {len(text)} characters, including the definitions that it refers to"
        )
    return text


def _with_names(schema: Any, root: dict[str, Any], names: dict[int, str], left: list[Any]) -> Any:
    if isinstance(schema, list):
        return [_with_names(each, root, names, left) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: each if key in _VALUES else _with_names(each, root, names, left) for key, each in schema.items()}
    reference = schema.get("$ref")
    referred = resolve(reference, root) if isinstance(reference, str) and reference.startswith("#") else None
    if isinstance(referred, dict):
        if id(referred) not in names:
            names[id(referred)] = f"part{len(names)}"
            left.append(referred)
        renamed["$ref"] = f"#/$defs/{names[id(referred)]}"
    return renamed


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
