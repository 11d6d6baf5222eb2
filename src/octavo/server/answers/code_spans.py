"""Code in Markdown: text between backticks, where what looks like a call is an example."""

from __future__ import annotations

import re

_ONE = r"`(\n|[^`\n]+[`\n])"
_TWO = r"``(\n|[^`\n]([^`\n]|`[^`\n])*(``|`?\n))"
_THREE = r"```([^`]|`[^`]|``[^`])*```"
CODE = f"({_ONE}|{_TWO}|{_THREE})"
"""A regular expression, for grammars as well: one or two backticks are closed by as many, or by the end of their line;
three by three."""
OUTSIDE = f"([^`]|{CODE})*"
"""Text that does not end within code."""
_PIECES = re.compile(r"`|\n|[^`\n]+")
_FENCE = 3


class CodeSpans:
    """Reads a text piece by piece. last: its last character, "" at its beginning."""

    def __init__(self) -> None:
        self.last = ""
        self._num_open = 0  # backticks that code was opened with
        self._num_seen = 0  # at the end of the text, that open or close nothing yet

    @property
    def is_outside(self) -> bool:
        """Whether what follows, other than a backtick, is no code."""
        return not self._num_open and not self._num_seen

    def feed(self, text: str) -> None:
        """Take some more text."""
        self.last = text[-1:] or self.last
        for piece in _PIECES.findall(text):
            if piece == "`":
                self._take_backtick()
                continue
            if not self._num_open:
                self._num_open = self._num_seen
            self._num_seen = 0
            if piece == "\n" and self._num_open < _FENCE:
                self._num_open = 0

    def _take_backtick(self) -> None:
        self._num_seen += 1
        if self._num_seen == (self._num_open or _FENCE):
            self._num_open, self._num_seen = 0 if self._num_open else _FENCE, 0
