"""Reads calls that are written in Python, and tells their arguments as JSON while they come. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from copy import copy
from string import hexdigits
from typing import TYPE_CHECKING

from octavo.server.answers.call_parser import Call, MalformedError
from octavo.server.answers.call_sections import NAME
from octavo.server.answers.code_spans import CodeSpans
from octavo.server.answers.parts import Heads
from octavo.server.answers.value_parser import ValueParser

if TYPE_CHECKING:
    from octavo.server.answers.call_parser import Wait

_KEY = re.compile(r"""[^\s=,()\[\]{}"']*""")
_WORD = re.compile(r"[\w.+-]+")
_PLAIN = re.compile(r"""[^"'\\]+""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_HEAD_END = re.compile(rf"\)|{_KEY.pattern}")
_SUBSCRIPTED = re.compile(r"[A-Za-z0-9_\])]")
_STARTS, _ENDS = "<|python_start|>", "<|python_end|>"
_MAX_WORD_CHARS = 512
_MAX_DEPTH = 64
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


class PythonParser(ValueParser):
    """Reads a list between marks. quotes: what strings begin with."""

    quotes = "\"'"

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._skip_space()
        name = yield from self._run(NAME)
        yield from self._skip_space()
        yield from self._expect("(")
        call.name = name
        yield from self._arguments(call, self._object(call, ")", 0))

    def _goes_on(self) -> Wait[bool]:
        """Calls on lines of their own have no mark between them."""
        if self._between:
            return (yield from super()._goes_on())
        char = yield from self._skip_space()
        return bool(char) and not self._closes.startswith(char)

    def _object(self, call: Call, closer: str, depth: int) -> Wait[None]:
        """Read names, or strings in a dictionary, with values, up to what closes them, and tell an object."""
        self._say_opened("{", "}", call)
        separator = ""
        while (yield from self._skip_space()) != closer:
            key = yield from self._key("=" if closer == ")" else ":")
            self._held_piece = f"{separator}{key}: "
            yield from self._python_value(call, depth)
            separator = ", "
            if (yield from self._skip_space()) != ",":
                break
            self._position += 1
        yield from self._skip_space()
        yield from self._expect(closer)
        self._say_closed(call)

    def _key(self, behind: str) -> Wait[str]:
        """Read a name and what stands behind it; return it as JSON."""
        if behind == ":":
            if (yield from self._peek()) not in {'"', "'"}:
                raise MalformedError
            key = yield from self._quoted(None)
        else:
            key = yield from self._bare_key(_KEY)
        yield from self._skip_space()
        yield from self._expect(behind)
        return key

    def _bare_key(self, letters: re.Pattern[str]) -> Wait[str]:
        key = yield from self._run(letters)
        if not key or (self._is_cut and self._position == len(self._text)):
            raise MalformedError
        return json.dumps(key, ensure_ascii=False)

    def _python_value(self, call: Call, depth: int) -> Wait[None]:
        if depth > _MAX_DEPTH:
            raise MalformedError
        char = yield from self._skip_space()
        if char and char in self.quotes:
            yield from self._quoted(call)
        elif char == "{":
            self._position += 1
            yield from self._object(call, "}", depth + 1)
        elif char and char in "[(":
            self._position += 1
            yield from self._items(call, "]" if char == "[" else ")", depth + 1)
        else:
            word = yield from self._run(_WORD)
            if self._is_cut and self._position == len(self._text):
                raise MalformedError  # of a word whose end is not known
            self._say(_word(word), call)
            self._drop()

    def _items(self, call: Call, closer: str, depth: int) -> Wait[None]:
        self._say_opened("[", "]", call)
        while (yield from self._skip_space()) != closer:
            yield from self._python_value(call, depth)
            self._held_piece = ", "
            if (yield from self._skip_space()) != ",":
                break
            self._position += 1
        yield from self._expect(closer)
        self._say_closed(call)

    def _quoted(self, call: Call | None) -> Wait[str]:
        """Read a string, and tell it as it comes, or return it as JSON where it is told to nobody."""
        quote = yield from self._peek()
        self._position += 1
        self._drop()
        if call is not None:
            self._say_opened('"', '"', call)
        written = ""
        while (char := (yield from self._peek())) != quote:
            if not char:
                raise MalformedError
            if char == "\\":
                text = yield from self._escape()
            elif char in "\"'":
                text = char
                self._position += 1
            else:
                run = _PLAIN.match(self._text, self._position)
                text = char if run is None else run.group()
                self._position += len(text)
            written += self._piece(text, call)
            self._drop()
        self._position += 1
        self._drop()
        if call is not None:
            self._say_closed(call)
        return f'"{written}"'

    def _piece(self, text: str, call: Call | None) -> str:
        """Tell a piece of a string, or return it as JSON where it is told to nobody."""
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        if call is None:
            return written
        self._tell("arguments", written, call)
        return ""

    def _escape(self) -> Wait[str]:
        self._position += 1
        kind = yield from self._peek()
        self._position += bool(kind)
        if kind not in _CODES:
            return _ESCAPES.get(kind, kind if kind in "\"'\\/" else "\\" + kind)
        code = yield from self._digits(_CODES[kind])
        if 0xD800 <= code < 0xDC00 and (yield from self._takes("\\u")):  # JSON's way: two halves
            low = yield from self._digits(4)
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xD800
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise MalformedError
        return chr(code)

    def _digits(self, count: int) -> Wait[int]:
        digits = ""
        for _ in range(count):
            digit = yield from self._peek()
            self._position += bool(digit)
            digits += digit
        if len(digits) < count or not all(each in hexdigits for each in digits):
            raise MalformedError
        return int(digits, 16)

    def _run(self, letters: re.Pattern[str]) -> Wait[str]:
        """Return as many letters as there are. Raises `MalformedError` for too many."""
        while True:
            found = letters.match(self._text, self._position)
            end = self._position if found is None else found.end()
            if end - self._position > _MAX_WORD_CHARS:
                raise MalformedError
            if end < len(self._text) or self._is_over:
                run = self._text[self._position : end]
                self._position = end
                return run
            yield


class PythonListParser(PythonParser):
    """Reads lists of calls, between Llama 4's marks or without any.

    Without marks it may be code. A list within a text begins with a known name, subscripts nothing, and stands outside
    of Markdown's code; an argument has a name, or there is none.
    """

    _is_tagged = False

    def _read(self) -> Wait[None]:
        self._before = CodeSpans()
        yield from self._skip_space()
        self._is_tagged = yield from self._takes_all(_STARTS)
        if (yield from self._skip_space()) == "[":
            self._position += 1
            yield from self._list()
        heads = Heads(f"[{name}(" for name in self._names)
        while found := (yield from self._content(_STARTS, "[")):
            start = self._position - (found == "[")
            self._is_tagged = found == _STARTS
            if (self._is_tagged or self._may_stand_at(start)) and (yield from self._begins_with(start, heads)):
                self._position = self._text.index("[", start) + 1
                yield from self._list()
            else:
                self._tell_content()

    def _list(self) -> Wait[None]:
        """Read calls behind the beginning of a list."""
        while (yield from self._attempt(call := Call(), self._call_steps(call))):
            self._before = CodeSpans()
            if not (yield from self._goes_on()):
                yield from self._takes_all(self._closes)
                yield from self._skip_space()
                self._drop()
                yield from self._takes_all(_ENDS)
                yield from self._skip_space()
                self._drop()
                break

    def _call_steps(self, call: Call) -> Wait[None]:
        if not self._is_tagged:
            yield from self._look_ahead()
        yield from super()._call_steps(call)

    def _look_ahead(self) -> Wait[None]:
        """Look whether what comes is a call. Raises `MalformedError` for other code."""
        start = self._position
        yield from self._skip_space()
        yield from self._run(NAME)
        yield from self._skip_space()
        yield from self._expect("(")
        if (yield from self._skip_space()) == ")":
            self._position += 1
            if (yield from self._skip_space()) not in {",", "]"}:
                raise MalformedError
        else:
            yield from self._key("=")
            if (yield from self._peek()) == "=":
                raise MalformedError
        self._position = start

    def _may_stand_at(self, start: int) -> bool:
        before = copy(self._before)
        before.feed(self._text[:start])
        return before.is_outside and not _SUBSCRIPTED.match(before.last)

    def _tell_content(self) -> None:
        self._before.feed(self._text[: self._position])
        super()._tell_content()

    def _is_cut_here(self) -> bool:
        """A list without a tag is one of calls for certain only if it begins as one."""
        if not super()._is_cut_here():
            return False
        begun = "".join(self._text.split())
        calls = (f"[{name}(" for name in self._names)
        return self._is_tagged or self._num_calls > 0 or any(_may_become(begun, each) for each in calls)


def _may_become(text: str, head: str) -> bool:
    """Whether a text may go on as a call with this head: the first argument's name stands behind it, or its end."""
    return head.startswith(text) or (text.startswith(head) and _HEAD_END.fullmatch(text, len(head)) is not None)


def _word(word: str) -> str:
    """Return the JSON of a word of Python's that is a value. Raises `MalformedError`."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        value = float(word.replace("_", "")) if "." in word or "e" in word.lower() else int(word, 0)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise MalformedError from None
