"""Find the end of a value that has no quotes and may contain tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.call_parser import MalformedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.server.answers.tagged_calls import TaggedFormat

    _Verdict: TypeAlias = tuple[int, int] | Literal[False] | None
    """Indices at which a value and its closing tag end. False: the marker is text. None: more text is needed."""

_MAX_MARK_CHARS = 512
_NO_BLANK = re.compile(r"\S")


def slips_of(tag: str) -> str:
    """Return a pattern that matches a marker.

    For a closing tag such as `</a>`, the pattern also matches `</a/>`, `</a >` and `</a`.
    """
    if tag.startswith("</") and tag.endswith(">"):
        return rf"{re.escape(tag[:-1])}(?:\s*/?>)?"
    return re.escape(tag)


def _after_blanks(text: str, place: int) -> int:
    found = _NO_BLANK.search(text, place)
    return len(text) if found is None else found.start()


class ValueEnd(Protocol):
    """Searches a growing text for the end of a value. looked_at: Index at which the next search begins."""

    looked_at: int

    def num_certain(self, text: str) -> int:
        """Return how many characters at the beginning of `text` certainly belong to the value."""
        ...

    def drop(self, text: str) -> None:
        """Shift the indices, because the caller removes `text` from the beginning of the searched text."""
        ...

    def find(self, text: str, *, is_over: bool) -> tuple[int, int] | None:
        """Return the indices at which the value and its closing marker end, or None if more text is needed.

        is_over: True if no more text follows. Raises `MalformedError` if the value's end is missing or ambiguous.
        """
        ...


class MarkEnd:
    """Ends a value at its closing marker. If an opening marker comes first, `find` raises `MalformedError`."""

    def __init__(self, opens: str, closes: str) -> None:
        self._marks, self._closes, self.looked_at = (opens, closes), closes, 0
        self._any = re.compile("|".join(map(re.escape, self._marks)))

    def num_certain(self, text: str) -> int:
        """See `ValueEnd`."""
        return len(text) - max(num_held_back_chars(text, each) for each in self._marks)

    def drop(self, text: str) -> None:
        """See `ValueEnd`."""
        self.looked_at = max(0, self.looked_at - len(text))

    def find(self, text: str, *, is_over: bool) -> tuple[int, int] | None:
        """See `ValueEnd`."""
        found = self._any.search(text, self.looked_at)
        if found and found.group() == self._closes:
            return found.span()
        if found or is_over:
            self.looked_at = found.start() if found else len(text)
            raise MalformedError
        self.looked_at = max(0, len(text) - max(map(len, self._marks)) + 1)
        return None


class TagEnd:
    """Ends a value at its closing tag, or before another marker.

    - A closing tag ends the value only if an argument, the end of the call or the end of the answer follows.
    - If the closing tag is missing, the value ends before the call's closing marker, or before an argument that is in
      the schema and not yet in the call.

    call_starts: Texts with which the missing arguments of the call begin.
    is_text: False if the value is JSON, which contains no tag.

    Private methods return None if more text is needed.
    """

    def __init__(
        self, form: TaggedFormat, closes: str, call_starts: Iterable[str], *, is_text: bool, is_padded: bool
    ) -> None:
        self._closes, self._is_text, self._is_padded = closes, is_text, is_padded
        self._closer = re.compile(slips_of(closes))
        self._begun = re.compile(rf"{re.escape(closes[:-1])}\s*/?")
        self._call_starts = tuple(call_starts)
        self._breaks = tuple(mark for each in (form.call_closes, form.closes) if (mark := each.strip()))
        self._openers = tuple(mark for each in (form.opener, form.call_opens) if (mark := each.strip()))
        self._opens = form.argument_opens.strip()
        inner = (form.value_closes.strip(),) if closes != form.value_closes else ()
        self._call_follows = (self._opens, *self._breaks)
        self._follows = (*self._call_follows, *inner)
        self._end = (*inner, *self._breaks)
        self._is_loose = form.argument_closes.startswith("\n")
        self._start = closes[:-1] if closes.startswith("</") and closes.endswith(">") else closes
        self._marks = (self._start, *self._call_starts, self._opens, *self._breaks, *self._openers)
        self._any = re.compile("|".join(map(re.escape, self._marks)))
        # The head of a call. "" is the place of the name. A text of `_call_follows` must follow.
        self._head = (*(form.call_opens or form.opens).split(), "", *form.named.split())
        self._name = form.head_pattern
        self._num_open = 0  # open calls within the value
        self._calls = re.compile("|".join(map(re.escape, (self._openers[-1], self._breaks[0]))))
        self._has_tags = False  # the value contains a tag as text
        # searched up to these indices
        self._ahead_at = self._inner_at = self._call_at = 0
        self._inner_depth = 0  # open calls at `_inner_at`
        self._surplus_at = 0  # markers before this index belong to calls within the value
        self.looked_at = 0
        self._before = ""  # the end of the removed text

    def num_certain(self, text: str) -> int:
        """See `ValueEnd`."""
        end = min(self.looked_at, len(text) - max(num_held_back_chars(text, each) for each in self._marks))
        return end - (self._is_loose and text.endswith("\n", 0, end))  # the line feed may separate two arguments

    def drop(self, text: str) -> None:
        """See `ValueEnd`."""
        self.looked_at -= len(text)
        known = (self._ahead_at, self._inner_at, self._call_at, self._surplus_at)
        self._ahead_at, self._inner_at, self._call_at, self._surplus_at = (max(0, each - len(text)) for each in known)
        self._before = (self._before + text)[-_MAX_MARK_CHARS:]

    def find(self, text: str, *, is_over: bool) -> tuple[int, int] | None:
        """See `ValueEnd`."""
        while found := self._any.search(text, self.looked_at):
            self.looked_at = found.start()
            ends = self._judged(text, found.start(), is_over=is_over)
            if ends is not False:
                return ends
            self.looked_at += 1
            self._ahead_at = 0
        self.looked_at = len(text)
        if is_over:
            raise MalformedError
        self.looked_at -= max(num_held_back_chars(text, each) for each in self._marks)
        return None

    def _judged(self, text: str, place: int, *, is_over: bool) -> _Verdict:
        closer = self._closer.match(text, place)
        head = next((each for each in self._call_starts if text.startswith(each, place)), None)
        if (closer or head) and (is_inner := self._is_inner(text, place, is_over=is_over)) is not False:
            return None if is_inner is None else False
        if closer:
            return self._judged_closer(text, closer, is_over=is_over)
        if head:
            return self._judged_head(text, place, place + len(head), is_over=is_over)
        if text.startswith(self._opens, place):
            return self._judged_unknown(text, place, is_over=is_over)
        return self._judged_mark(text, place, is_over=is_over)

    def _is_inner(self, text: str, place: int, *, is_over: bool) -> bool | None:
        """Return True if the marker at `place` belongs to a call that the value quotes.

        A value may contain whole calls as text. The marker is inner if such a quoted call is open at `place`, and
        enough markers follow to close every quoted call and also the real call, whose argument is this value.
        """
        if not self._num_open:
            return False
        if place < self._surplus_at:
            return True
        start, depth = (self._inner_at, self._inner_depth) if self._inner_at > place else (place, self._num_open)
        for mark in self._calls.finditer(text, start):
            if mark.group() == self._openers[-1]:
                begins = self._begins_call(text, mark.start(), is_over=is_over)
                if begins is None:
                    self._inner_at, self._inner_depth = mark.start(), depth
                    return None
                depth += begins
            elif depth:
                depth -= 1
            else:
                self._surplus_at = mark.start()
                return True
            start = mark.end()
        self._inner_at, self._inner_depth = max(start, len(text) - _MAX_MARK_CHARS), depth
        return False if is_over else None

    def _begins_call(self, text: str, place: int, *, is_over: bool) -> bool | None:
        rest = text[place : place + _MAX_MARK_CHARS]
        unknown = False if is_over or len(rest) == _MAX_MARK_CHARS else None
        for mark in self._head:
            rest = rest.lstrip()
            if not mark:
                rest = self._name.sub("", rest, count=1)
            elif rest.startswith(mark):
                rest = rest[len(mark) :]
            else:
                return unknown if mark.startswith(rest) else False
        rest = rest.lstrip()
        if rest.startswith(self._call_follows):
            return True
        return unknown if any(each.startswith(rest) for each in self._call_follows) else False

    def _judged_mark(self, text: str, place: int, *, is_over: bool) -> _Verdict:
        if not any(text.startswith(each, place) for each in self._breaks):
            begins = self._begins_call(text, place, is_over=is_over)
            if begins is None:
                return None
            self._has_tags = True
            self._num_open += begins
            return False
        if self._num_open and text.startswith(self._breaks[0], place):
            self._num_open -= 1
            return False
        # If the closing tag is missing, the value ends before the call's closing marker.
        is_placed = self._is_alone_on_line(text, place) and text.startswith(self._breaks[0], place)
        is_end = is_placed and self._is_end_of_call(text, place, is_over=is_over)
        if not is_end:
            return is_end
        ends = self._is_proper_end_ahead(text, place, is_over=is_over)
        if ends is not False:
            return None if ends is None else False
        if self._breaks[0] in text[place + 1 : self._next_call(text, place, is_over=is_over)[0]]:
            raise MalformedError  # ambiguous
        return self._broken_off(text, place)

    def _judged_head(self, text: str, place: int, end: int, *, is_over: bool) -> _Verdict:
        if not self._is_padded and not self._is_loose and self._is_text:
            raise MalformedError  # ambiguous
        if self._is_padded and text[end : end + 1] != "\n":
            return None if end == len(text) and not is_over else False
        is_line = self._written(text, place)[-1:] == "\n" or not self._is_text
        return self._broken_off(text, place) if is_line else False

    def _judged_unknown(self, text: str, place: int, *, is_over: bool) -> Literal[False] | None:
        rest = text[place : place + _MAX_MARK_CHARS]
        if not is_over and any(each.startswith(rest) for each in self._call_starts):
            return None
        written = self._written(text, place)
        is_placed = written[-1:] == "\n" or not (self._is_padded or self._is_loose)
        if is_placed and self._is_text and not self._num_open and self._ends_in_part_of_tag(written, 2):
            raise MalformedError
        return False

    def _is_end_of_call(self, text: str, place: int, *, is_over: bool) -> bool | None:
        place = _after_blanks(text, place + len(self._breaks[0]))
        rest = text[place : place + _MAX_MARK_CHARS]
        if not rest:
            return len(self._breaks) == 1 if is_over else None
        after = (*self._breaks, *self._openers)
        if rest.startswith(after):
            return True
        return None if not is_over and any(each.startswith(rest) for each in after) else False

    def _judged_closer(self, text: str, closer: re.Match[str], *, is_over: bool) -> _Verdict:
        follows = self._follow(text, closer.end(), is_over=is_over)
        if follows is None or (not is_over and self._begun.fullmatch(text, closer.start())):
            return None
        if not self._is_text:
            return closer.span()
        if not follows:
            self._has_tags = True
            return False
        is_ended = self._is_ended(text, closer, follows, is_over=is_over)
        if is_ended and closer.group() != self._closes and not self._is_only_slip(text, closer):
            raise MalformedError  # ambiguous
        return closer.span() if is_ended else is_ended

    def _is_ended(self, text: str, closer: re.Match[str], follows: str, *, is_over: bool) -> bool | None:
        """Return True if a closing tag ends the value. One of these conditions must be true.

        - A known argument follows.
        - The line break before the tag is as in the format. If the call ends after the tag, the call's end is also as
          in the format.
        - No later closing tag can end the value.
        """
        if follows == "head":
            return True
        is_regular: bool | None = self._is_alone_on_line(text, closer.start())
        if is_regular and follows == "end":
            is_whole = closer.group() == self._closes
            is_regular = is_whole and self._is_regular_end(text, closer.end(), is_over=is_over)
        if is_regular is not False:
            return is_regular
        is_later = self._is_proper_end_ahead(text, closer.start() + 1, is_over=is_over)
        return None if is_later is None else not is_later

    def _is_regular_end(self, text: str, place: int, *, is_over: bool) -> bool | None:
        for mark in self._end:
            place = _after_blanks(text, place)
            if not text.startswith(mark, place):
                is_begun = mark.startswith(text[place : place + len(mark)])
                return None if is_begun and not is_over else is_begun
            place += len(mark)
        return True

    def _is_only_slip(self, text: str, closer: re.Match[str]) -> bool:
        place = _after_blanks(text, closer.end())
        if text.startswith(self._breaks, place):
            is_next = text.startswith(self._end[0], place)
        else:
            is_next = not self._is_loose or "\n" in text[closer.end() : place]
        return is_next and self._is_alone_on_line(text, closer.start())

    def _is_alone_on_line(self, text: str, place: int) -> bool:
        return not self._is_padded or self._written(text, place)[-1:] in {"\n", ""}

    def _written(self, text: str, place: int) -> str:
        return (self._before + text[max(0, place - _MAX_MARK_CHARS) : place])[-_MAX_MARK_CHARS:]

    def _follow(self, text: str, place: int, *, is_over: bool) -> Literal["head", "argument", "end", ""] | None:
        """Return the kind of the text after a closing tag of the value.

        - "head": The beginning of a known argument, or an incomplete marker at the end of the answer. A known argument
          is in the schema and not yet in the call.
        - "argument": The beginning of an unknown argument, or the value's closing tag again.
        - "end": The closing marker of what contains the value: the argument, the call or the section.
        - "": Other text.
        - None: More text is needed.
        """
        place = _after_blanks(text, place)
        rest = text[place : place + _MAX_MARK_CHARS]
        marks = (*self._call_starts, *self._follows, self._closes)
        if any(each.startswith(rest) and each != rest for each in marks):
            return "head" if is_over else None
        if any(rest.startswith(each) for each in self._call_starts):
            return "head"
        if rest.startswith((self._opens, self._closes)):
            return "argument"
        return "end" if rest.startswith(self._follows) else ""

    def _is_proper_end_ahead(self, text: str, place: int, *, is_over: bool) -> bool | None:
        """Return True if a later closing tag, complete or cut off, can end the value before the next call."""
        pad = "\n" if self._is_padded else ""
        ends = pad + self._start
        place = max(place, self._ahead_at)
        limit, is_call = self._next_call(text, place, is_over=is_over)
        while (place := text.find(ends, place, limit)) >= 0:
            closer = self._closer.match(text, place + len(ends) - len(self._start))
            follows = self._follow(text, closer.end() if closer else place + len(ends), is_over=is_over)
            if follows is None or follows:
                self._ahead_at = place
                return None if follows is None else True
            place += 1
        self._ahead_at = max(self._ahead_at, min(limit, len(text) - _MAX_MARK_CHARS))
        if is_call:
            return False
        return num_held_back_chars(text, ends) > len(pad) if is_over else None

    def _next_call(self, text: str, place: int, *, is_over: bool) -> tuple[int, bool]:
        """Return (index of the next call, True if the call is certain), or (length of the text, False)."""
        opener = self._openers[-1]
        self._call_at = max(place, self._call_at)
        while (found := text.find(opener, self._call_at)) >= 0:
            begins = self._begins_call(text, found, is_over=False)
            if begins is not False:
                self._call_at = found
                return found, is_over or bool(begins)
            self._call_at = found + 1
        self._call_at = max(self._call_at, len(text) - len(opener))
        return len(text), False

    def _broken_off(self, text: str, place: int) -> tuple[int, int]:
        written = self._written(text, place)
        if self._has_tags or not written.strip() or (self._is_text and self._is_padded and written.endswith("\n\n")):
            raise MalformedError  # it is unknown which line feeds belong to the value
        if self._is_text and self._ends_in_part_of_tag(written, 1):
            raise MalformedError
        is_line = not self._is_padded and self._is_loose and text.endswith("\n", 0, place)
        return place - is_line, place

    def _ends_in_part_of_tag(self, written: str, num_chars: int) -> bool:
        pad, closes, size = "\n" if self._is_padded else "", self._closes, len(self._closes)
        nums = range(num_chars, size)
        parts = tuple(pad + closes[:end] + closes[size - num + end :] for num in nums for end in range(num + 1))
        return (pad + written.rstrip()).endswith(parts)
