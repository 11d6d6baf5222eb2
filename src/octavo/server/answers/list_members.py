"""Find the end of a malformed call in a list."""

from __future__ import annotations

import re

_STOP = re.compile(r"""["'\[\](){}`]""")
_STRINGS = {quote: re.compile(rf"{quote}(?:[^{quote}\\\n]|\\.)*+{quote}\s*+(?=[\]}}),:])") for quote in "\"'"}
_BEFORE = "[{(,:="
_CLOSERS = {"[": "]", "{": "}", "(": ")"}


def member_end(text: str) -> int | None:
    """Return the length of the object or Python call at the beginning of `text`, or None if uncertain.

    The length is certain if the brackets match, and if punctuation of JSON or Python precedes and follows each string.
    """
    stack, place, last = list[str](), 0, 0
    while (found := _STOP.search(text, place)) is not None:
        char, place = found.group(), found.end()
        if char in _STRINGS:
            string = _STRINGS[char].match(text, found.start())
            before = text[last : found.start()].rstrip()
            if string is None or (before or text[max(last - 1, 0) : last])[-1:] not in _BEFORE:
                return None
            place = string.end()
        elif char in _CLOSERS:
            stack.append(_CLOSERS[char])
        elif not stack or stack.pop() != char:  # also if `char` is a backtick
            return None
        elif not stack:
            return place
        last = place
    return None
