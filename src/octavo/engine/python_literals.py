"""Parse Python literals with `ast`, without evaluating code."""

from __future__ import annotations

import ast
import json
import re
import threading
import warnings
from typing import Any, NoReturn

_MAX_CHARS = 1_000_000
_MAX_DEPTH = 100
_STRING = re.compile(r"""(?P<quote>'''|\"\"\"|'|")""")
_BEGUN_STRING = re.compile(r"""(?:''?|""?)\Z""")
_STOPS = {quote: re.compile(rf"[{quote}\\\n\r]") for quote in "\"'"}
_MAX_ESCAPE_CHARS = 12
_WORD = re.compile(r"[\w.]+")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_PARSING = threading.Lock()  # `catch_warnings` affects all threads
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class NotALiteralError(ValueError):
    """The text is not a literal that JSON can express."""


class ValueScanner:
    """Finds the end of a literal in a text that arrives in pieces.

    ends: Characters that end the literal outside of brackets and strings. If "", the literal ends after its last
    bracket.
    is_begun: True if the whole text has arrived but the literal is incomplete.
    line_ends: Positions of unescaped line ends in strings without triple quotes.
    """

    def __init__(self, start: int, ends: str = ",)") -> None:
        self.is_begun = False
        self.line_ends: list[int] = []
        self._start = start
        self._position, self._ends = start, ends
        self._stack: list[str] = []
        self._quote = ""
        self._whole: tuple[int, str] | None = None  # end of the last complete member, and missing closing brackets

    def end(self, text: str, *, is_over: bool) -> int | None:
        """Return the literal's end, or None if more text is needed.

        is_over: True if no more text will come. Raises `NotALiteralError` for brackets that do not match, and for an
        incomplete literal if `is_over`.
        """
        while self._position < len(text):
            before = self._position
            char = text[before]
            if self._quote:
                self._scan_string(text)
            elif not self._stack and char in self._ends:
                return before
            elif opened := _STRING.match(text, before):
                if not is_over and _BEGUN_STRING.match(text, before):
                    break  # an empty string, or the start of three quotes
                self._quote, self._position = opened.group("quote"), opened.end()
            else:
                self._take(text, char)
                if not self._stack and not self._ends:
                    return self._position
            if self._position == before and self._quote:
                break
        if is_over:
            self.is_begun = True
            raise NotALiteralError
        return None

    def value(self, text: str, end: int) -> str:
        """Return the literal's text with escaped line ends."""
        pieces, start = list[str](), self._start
        for place in (each for each in self.line_ends if each < end):
            pieces += [text[start:place], "\\n" if text[place] == "\n" else "\\r"]
            start = place + 1
        return "".join([*pieces, text[start:end]])

    def begun_json(self, text: str) -> str | None:
        """Convert a cut-off string, list or dict to cut-off JSON. Return None for any other value.

        A list or dict ends after the last complete member: `[1, 2` becomes `[1`.
        """
        if self._whole is None:
            return begun_string_json(self.value(text, len(text)).lstrip())
        end, closers = self._whole
        try:
            return literal_json(self.value(text, end) + closers)[: -len(closers)]
        except NotALiteralError:
            return None

    def _scan_string(self, text: str) -> None:
        quote = self._quote
        found = _STOPS[quote[0]].search(text, self._position)
        if found is None:
            self._position = len(text)
        elif found.group() == "\\":
            self._position = found.start() + (2 if found.end() < len(text) else 0)
        elif found.group() in "\n\r":
            if len(quote) == 1:
                self.line_ends.append(found.start())
            self._position = found.end()
        elif text.startswith(quote, found.start()):
            self._quote, self._position = "", found.start() + len(quote)
        else:
            is_open = len(text) - found.start() < len(quote)
            self._position = found.start() + (0 if is_open and quote.startswith(text[found.start() :]) else 1)

    def _take(self, text: str, char: str) -> None:
        before = self._position
        word = _WORD.match(text, self._position)
        self._position = self._position + 1 if word is None else word.end()
        if char in _CLOSERS:
            self._stack.append(_CLOSERS[char])
            if len(self._stack) > _MAX_DEPTH:
                raise NotALiteralError
        elif char in ")]}" and (not self._stack or self._stack.pop() != char):
            raise NotALiteralError
        if char in ",[]{}" and self._stack and ")" not in self._stack:  # in a tuple, the last comma matters: `(1,)`
            self._whole = before if char == "," else self._position, "".join(reversed(self._stack))


def literal(text: str) -> Any:
    """Return the value of JSON or a Python literal.

    Tuples become lists. JSON's `true`, `false` and `null` are allowed. Raises `NotALiteralError` for anything else,
    such as names, calls, f-strings, bytes, sets, non-string keys and lone surrogates.
    """
    if len(text) > _MAX_CHARS or not text.strip():
        raise NotALiteralError
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _python_value(text)
    return value


def literal_json(text: str) -> str:
    """Return a literal as JSON."""
    try:
        return json.dumps(literal(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise NotALiteralError from None


def begun_string_json(text: str) -> str | None:
    """Convert an unfinished string to JSON that has no closing quote. Return None for other text."""
    opened = _STRING.match(text)
    if opened is None:
        return None
    for end in range(len(text), max(opened.end(), len(text) - _MAX_ESCAPE_CHARS) - 1, -1):
        try:
            written = literal_json(text[:end] + opened.group())
        except NotALiteralError:
            continue
        return written[:-1] if written.startswith('"') else None
    return None


def _python_value(text: str) -> Any:
    try:
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(f"({text.strip()})", mode="eval")  # parentheses allow several lines
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
            return _JSON_WORDS[name]
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
