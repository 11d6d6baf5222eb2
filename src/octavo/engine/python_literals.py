"""Python's literals in a text: where a value ends, and what it is by the rules of `ast`. Nothing is evaluated."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NoReturn

_MAX_CHARS = 1_000_000
_MAX_DEPTH = 100
_PREFIX = r"(?:[rR]|[uU])?"
_STRING = re.compile(_PREFIX + r"(?P<quote>'''|\"\"\"|'|\")")
_BEGUN_STRING = re.compile(_PREFIX + r"(?:''?|\"\"?)?\Z")
_WORD = re.compile(r"[\w.]+")
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class NotALiteralError(ValueError):
    """A text is no literal that JSON has a value for."""


def end_of_value(text: str, start: int, *, is_over: bool, ends: str = "") -> int | None:
    """Return where a value ends: after its last bracket, or before one of the characters `ends` outside of strings.

    Returns None where more text is needed. Raises `NotALiteralError` for brackets that do not match, for strings of
    one line with a line feed, and at the end of a text (is_over) within a value.
    """
    position, stack = start, list[str]()
    while position < len(text):
        char = text[position]
        if not stack and char in ends:
            return position
        if char in "\"'" or (char.isalpha() and _STRING.match(text, position)):
            end = end_of_string(text, position, is_over=is_over)
            if end is None:
                return None
            position = end
            continue
        if char in _CLOSERS:
            stack.append(_CLOSERS[char])
            if len(stack) > _MAX_DEPTH:
                raise NotALiteralError
        elif char in ")]}":
            if not stack or stack.pop() != char:
                raise NotALiteralError
            if not stack and not ends:
                return position + 1
        elif char.isalnum() or char == "_":
            word = _WORD.match(text, position)
            position = position + 1 if word is None else word.end()
            continue
        position += 1
    if is_over:
        raise NotALiteralError
    return None


def end_of_string(text: str, start: int, *, is_over: bool) -> int | None:
    """Return where a string with its prefix ends. Returns None and raises as `end_of_value` does."""
    if not is_over and _BEGUN_STRING.match(text, start):
        return None  # two quotes may be an empty string, or the beginning of three
    opened = _STRING.match(text, start)
    if opened is None:
        raise NotALiteralError
    quote, position = opened.group("quote"), opened.end()
    while position < len(text):
        if text.startswith(quote, position):
            return position + len(quote)
        if text[position] == "\\":
            position += 2
        elif text[position] == "\n" and len(quote) == 1:
            raise NotALiteralError
        elif not is_over and len(text) - position < len(quote):
            return None
        else:
            position += 1
    if is_over:
        raise NotALiteralError
    return None


def literal(text: str) -> Any:
    """Return the value of JSON or of a Python literal: text, numbers, truth values, nothing, lists and dictionaries.

    Tuples are lists; JSON's `true`, `false` and `null` may stand in Python. Raises `NotALiteralError` for anything
    else: names, calls, f-strings, bytes, sets, keys that are no strings, halves of characters.
    """
    if len(text) > _MAX_CHARS:
        raise NotALiteralError
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _python_value(text)
    return value


def literal_json(text: str) -> str:
    """Return the JSON of what `literal` returns. Raises `NotALiteralError`."""
    try:
        return json.dumps(literal(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # of a number with more digits than Python writes
        raise NotALiteralError from None


def _python_value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know stays as it is
            tree = ast.parse(text.strip(), mode="eval")
        return _value_of(tree.body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise NotALiteralError from None


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str(text)):
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value if value is None or abs(value) != float("inf") else _refuse("")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            if isinstance(value, bool):
                raise NotALiteralError
            return -value if isinstance(sign, ast.USub) else value
        case ast.Name(id=name) if name in _JSON_WORDS:
            return ast.literal_eval(_JSON_WORDS[name])
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            return {_key_of(key): _value_of(value) for key, value in zip(keys, values, strict=True)}
    raise NotALiteralError


def _key_of(node: ast.expr | None) -> str:
    key = None if node is None else _value_of(node)
    if not isinstance(key, str):
        raise NotALiteralError
    return key


def _refuse(word: str) -> NoReturn:
    raise NotALiteralError(word)
