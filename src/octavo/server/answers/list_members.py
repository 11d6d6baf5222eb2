"""Find a malformed member's end."""

from __future__ import annotations

import re

_STOP = re.compile(r"""["'\[\](){}`]""")
_STRINGS = {quote: re.compile(rf"{quote}(?:[^{quote}\\\n]|\\.)*+{quote}\s*+(?=[\]}}),:])") for quote in "\"'"}
_BEFORE = "[{(,:="
_CLOSERS = {"[": "]", "{": "}", "(": ")"}


def member_end(text: str) -> int | None:
    """Return the length of the object or Python call that begins the text, or None if it is uncertain.

    An unescaped quote would end a string too early, so strings must be between punctuation marks of JSON or Python.
    Brackets must match.
    """
    stack, place, last = list[str](), 0, 0
    while (found := _STOP.search(text, place)) is not None:
        char, place = found.group(), found.end()
        if char in _STRINGS:
            string = _STRINGS[char].match(text, found.start())
            before = text[last : found.start()].rstrip()  # since the last string or bracket
            if string is None or (before or text[max(last - 1, 0) : last])[-1:] not in _BEFORE:
                return None
            place = string.end()
        elif char in _CLOSERS:
            stack.append(_CLOSERS[char])
        elif not stack or stack.pop() != char:  # as "`", which closes nothing
            return None
        elif not stack:
            return place
        last = place
    return None
