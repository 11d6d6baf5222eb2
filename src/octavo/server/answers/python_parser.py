"""Convert calls in Python's syntax to JSON. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from copy import copy
from typing import TYPE_CHECKING

from octavo.engine.python_literals import NotALiteralError, ValueScanner, literal_json
from octavo.server.answers.call_parser import Call, MalformedError
from octavo.server.answers.call_sections import NAME
from octavo.server.answers.code_spans import CodeSpans
from octavo.server.answers.parts import CallStarts
from octavo.server.answers.value_parser import ValueParser

if TYPE_CHECKING:
    from octavo.server.answers.call_parser import Wait

_KEY = re.compile(r"""[^\s=,()\[\]{}"']*""")
_HEAD_END = re.compile(rf"\)|{_KEY.pattern}")
_SUBSCRIPTED = re.compile(r"[A-Za-z0-9_\])]")
_STARTS, _ENDS = "<|python_start|>", "<|python_end|>"


class PythonParser(ValueParser):
    """Reads a list of calls between markers. Values are literals, as for `ast.literal_eval`."""

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._skip_space()
        name = yield from self._run(NAME)
        yield from self._expect("(")
        call.name = name
        yield from self._arguments(call, self._named_values(call))

    def _has_next_call(self) -> Wait[bool]:
        if self._between:
            return (yield from super()._has_next_call())
        # False at the end of the answer: `char` is "", and every string starts with "".
        char = yield from self._skip_space()
        return not self._closes.startswith(char)

    def _named_values(self, call: Call) -> Wait[None]:
        self._report("arguments", "{", call)
        given = set[str]()
        while (yield from self._skip_space()) != ")":
            key = yield from self._key()
            if key in given:
                raise MalformedError
            self._drop()
            self._held_piece = f"{', ' if given else ''}{json.dumps(key, ensure_ascii=False)}: "
            value = yield from self._python_value(call)
            self._say(value, call)
            given.add(key)
            self._drop()
            if not (yield from self._takes_next(",")):
                break
        yield from self._expect(")")
        self._report("arguments", "}", call)

    def _key(self) -> Wait[str]:
        key = yield from self._run(_KEY)
        if not key:
            raise MalformedError
        yield from self._expect("=")
        return key

    def _python_value(self, call: Call) -> Wait[str]:
        """Return the next value's JSON. Raises `MalformedError` if the value is incomplete or not a literal.

        If the answer was cut off within the value, the JSON of the value's beginning is emitted before the raise.
        """
        start = self._position
        scanner = ValueScanner(start)
        try:
            while (end := scanner.end(self._text, is_over=self._is_over)) is None:
                yield
            value = literal_json(scanner.value(self._text, end))
        except NotALiteralError:
            if scanner.is_begun and (self._is_cut or not scanner.line_ends):
                self._position = len(self._text)
            if scanner.is_begun and self._is_cut and (begun := scanner.begun_json(self._text)) is not None:
                self._say(begun, call)
            raise MalformedError from None
        self._position = end
        return value


class PythonListParser(PythonParser):
    """Reads lists of calls, with or without Llama 4's markers.

    A list without markers may be code. The parser reads such a list only under these conditions:
    - Each call has no arguments, or begins with a keyword argument.
    - A list after other text begins with a function's name, and is neither a subscript nor Markdown code.
    """

    _is_tagged = False

    def _read(self) -> Wait[None]:
        self._before = CodeSpans()
        yield from self._skip_space()
        self._is_tagged = yield from self._takes_all(_STARTS)
        if (yield from self._skip_space()) == "[":
            self._position += 1
            yield from self._list()
        call_starts = CallStarts(f"[{name}(" for name in self._names)
        while found := (yield from self._content(_STARTS, "[")):
            start = self._position - (found == "[")
            self._is_tagged = found == _STARTS
            if (self._is_tagged or self._may_start_at(start)) and (yield from self._begins_with(start, call_starts)):
                self._position = self._text.index("[", start) + 1
                yield from self._list()
            else:
                self._report_content()

    def _list(self) -> Wait[None]:
        self._is_list = self._is_tagged
        yield from self._calls()

    def _end_member(self) -> None:
        self._before = CodeSpans()

    def _takes_section_end(self) -> Wait[None]:
        for mark in (self._closes, _ENDS):
            yield from self._takes_all(mark)
            yield from self._drop_space()

    def _call_steps(self, call: Call) -> Wait[None]:
        if not self._is_tagged:
            yield from self._look_ahead()
        yield from super()._call_steps(call)

    def _look_ahead(self) -> Wait[None]:
        start = self._position
        yield from self._skip_space()
        yield from self._run(NAME)
        yield from self._expect("(")
        if (yield from self._takes_next(")")):
            if (yield from self._skip_space()) not in {",", "]"}:
                raise MalformedError
        else:
            yield from self._key()
            if (yield from self._peek()) == "=":
                raise MalformedError
        self._position = start

    def _may_start_at(self, start: int) -> bool:
        before = copy(self._before)
        before.feed(self._text[:start])
        return before.is_outside and not _SUBSCRIPTED.match(before.last)

    def _report_content(self) -> None:
        self._before.feed(self._text[: self._position])
        super()._report_content()

    def _is_cut_here(self) -> bool:
        if not super()._is_cut_here():
            return False
        begun = "".join(self._text.split())
        calls = (f"[{name}(" for name in self._names)
        return self._is_tagged or self._num_calls > 0 or any(_may_become(begun, each) for each in calls)


def _may_become(text: str, head: str) -> bool:
    return head.startswith(text) or (text.startswith(head) and _HEAD_END.fullmatch(text, len(head)) is not None)
