"""Base of the parsers for arguments that are not written as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo.server.answers.argument_values import UnreadableError, value_text
from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.call_sections import SectionParser

if TYPE_CHECKING:
    import re

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.value_ends import ValueEnd


_MAX_WORD_CHARS = 512


class ValueParser(SectionParser):
    """Emits the name of an argument together with the first piece of the value."""

    is_padded = False
    _held_piece = ""  # emitted before the next value

    def _arguments(self, call: Call, steps: Wait[None]) -> Wait[None]:
        self._begin(call)
        self._drop()
        self._held_piece = ""
        yield from steps
        self._drop()

    def _say(self, text: str, call: Call) -> None:
        self._report("arguments", self._held_piece + text, call)
        self._held_piece = ""

    def _run(self, letters: re.Pattern[str]) -> Wait[str]:
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

    def _read_value(self, text: str, schema: dict[str, Any], root: dict[str, Any]) -> str | None:
        try:
            return value_text(text, schema, root)
        except UnreadableError:
            raise MalformedError from None

    def _text_value(self, call: Call, ends: ValueEnd, *, is_padded: bool = False) -> Wait[None]:
        while (found := self._end_or_cut(ends, call, is_padded=is_padded)) is None:
            self._position = len(_unpadded(self._text[: ends.num_certain(self._text)], is_padded))
            self._report("arguments", _escaped(self._text[: self._position]), call)
            ends.drop(self._text[: self._position])
            self._drop()
            yield
        end, self._position = found
        self._report("arguments", _escaped(_unpadded(self._text[:end], is_padded)) + '"', call)
        self._drop()

    def _end_or_cut(self, ends: ValueEnd, call: Call, *, is_padded: bool) -> tuple[int, int] | None:
        """Return the result of `ends.find`, or raise its `MalformedError`.

        If the answer was cut off within the string, the string's beginning is emitted before the raise.
        """
        try:
            return ends.find(self._text, is_over=self._is_over)
        except MalformedError:
            if self._is_cut:
                text = _unpadded(self._text[: ends.num_certain(self._text)], is_padded)
                self._position = len(self._text)
                self._report("arguments", _escaped(text), call)
                self._drop()
            else:
                self._position = ends.looked_at
            raise

    def _whole_value(self, ends: ValueEnd, *, is_padded: bool = False) -> Wait[str]:
        try:
            while (found := ends.find(self._text, is_over=self._is_over)) is None:
                yield
        except MalformedError:
            self._position = len(self._text) if self._is_cut else ends.looked_at
            raise
        end, self._position = found
        text = _unpadded(self._text[:end], is_padded)
        self._drop()
        return text


def _unpadded(text: str, is_padded: bool) -> str:
    return text.removesuffix("\n") if is_padded else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
