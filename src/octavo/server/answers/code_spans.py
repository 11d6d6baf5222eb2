"""Find code in Markdown. A call within backticks is an example, so it is content."""

from __future__ import annotations

import re

_ONE = r"`(\n|[^`\n]+[`\n])"
_TWO = r"``(\n|[^`\n]([^`\n]|`[^`\n])*(``|`?\n))"
_THREE = r"```([^`]|`[^`]|``[^`])*```"
CODE = f"({_ONE}|{_TWO}|{_THREE})"
"""A pattern of code in Markdown, also for grammars.

The same number of backticks, or the end of the line, closes one or two backticks. Only three backticks close three.
"""
OUTSIDE = f"([^`]|{CODE})*"
"""A pattern of text that does not end within code."""
_PIECES = re.compile(r"`|\n|[^`\n]+")
_FENCE = 3


class CodeSpans:
    """Tracks whether a growing text ends within Markdown code."""

    def __init__(self) -> None:
        self.last = ""
        self._num_open = 0  # backticks that opened the code
        self._num_seen = 0  # backticks at the end of the text

    @property
    def is_outside(self) -> bool:
        """True if the text ends outside of code, and not with a backtick that may begin code."""
        return not self._num_open and not self._num_seen

    def feed(self, text: str) -> None:
        """Append text."""
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
