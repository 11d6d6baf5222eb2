"""What parsers share whose calls have their arguments in a notation that is not JSON, and tell them as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.call_sections import SectionParser

if TYPE_CHECKING:
    from octavo.server.answers.call_parser import Call, Wait


class ValueParser(SectionParser):
    """Tells values while they come.

    However a call ends, unless the answer was cut off within, its arguments are a whole object: names are told with the
    first of their values, and where a value breaks, what is open is closed.
    """

    is_padded = False
    _held = ""  # what stands before the next value
    _open = ""  # what closes what was told, the innermost first

    def _arguments(self, call: Call, steps: Wait[None]) -> Wait[None]:
        """Decide that this is a call, and tell its arguments by these steps."""
        self._begin(call)
        self._drop()
        self._held = self._open = ""
        try:
            yield from steps
        except MalformedError:
            if not self._is_cut:
                self._tell("arguments", self._open, call)
            raise
        self._drop()

    def _say(self, text: str, call: Call) -> None:
        """Tell a value, or where it begins, with what was held back before it."""
        self._tell("arguments", self._held + text, call)
        self._held = ""

    def _say_opened(self, opener: str, closer: str, call: Call) -> None:
        self._say(opener, call)
        self._open = closer + self._open

    def _say_closed(self, call: Call) -> None:
        closer, self._open, self._held = self._open[0], self._open[1:], ""
        self._tell("arguments", closer, call)

    # --- values that are bare text up to a mark

    def _text_value(self, call: Call, closes: str) -> Wait[bool]:
        """Read a string, and tell it as it comes, without the quote in front; whether its mark was there."""
        while (end := self._text.find(closes)) < 0 and not self._is_over:
            self._position = len(self._unpadded(len(self._text) - num_held_back_chars(self._text, closes)))
            self._tell("arguments", _escaped(self._text[: self._position]), call)
            self._drop()
            yield
        if end < 0:
            text = self._unpadded(len(self._text) - (num_held_back_chars(self._text, closes) if self._is_cut else 0))
            self._position = len(self._text)
        else:
            text, self._position = self._unpadded(end), end + len(closes)
        is_whole = end >= 0 or not self._is_cut
        self._tell("arguments", _escaped(text) + ('"' if is_whole else ""), call)
        self._drop()
        return end >= 0

    def _whole_value(self, closes: str) -> Wait[str | None]:
        """Return the text of a value; None where the answer was cut off within."""
        looked_at = 0
        while (end := self._text.find(closes, looked_at)) < 0 and not self._is_over:
            looked_at = max(0, len(self._text) - len(closes))
            yield
        if end < 0:
            text = None if self._is_cut else self._unpadded(len(self._text))
            self._position = len(self._text)
        else:
            text, self._position = self._unpadded(end), end + len(closes)
        self._drop()
        return text

    def _unpadded(self, end: int) -> str:
        text = self._text[:end]
        return text.removesuffix("\n") if self.is_padded else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
