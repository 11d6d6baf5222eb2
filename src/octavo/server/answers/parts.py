"""Split an answer into parts while the answer arrives.

The parts do not depend on the sizes of the arriving pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.engine.stop_strings import num_held_back_chars

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_HELD_SPACE = 256
MAX_BLANKS = 8
_BLANKS = " \t\r\n"

PartKind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    text: The tool's name if `kind` is `call`, or a piece of JSON if `kind` is `arguments`. The whole JSON is incomplete
    if the answer was cut off, and broken if a long call was malformed.
    start: Index of the part's first character in the answer. Calls and arguments may have an earlier index.
    """

    kind: PartKind
    text: str
    call: int = 0
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The markers around a model family's reasoning.

    is_found_by_opens: True to detect the form by `opens` instead of `closes`.
    """

    name: str
    opens: str
    closes: str
    is_found_by_opens: bool = False


THINK = ReasoningForm("think", "<think>", "</think>")


class AnswerParser(Protocol):
    """Parses one answer."""

    def feed(self, text: str) -> list[Part]:
        """Add text. Return the parts that later text cannot change."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts. If the answer was cut off, drop an incomplete marker or call head at the end."""
        ...


def joined(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent parts of content, reasoning or one call's arguments. Drop empty parts.

    Parts of content are joined only if they are also adjacent in the answer.
    """
    if len(parts) == 1 and parts[0].text:
        return [*parts]
    runs: list[list[Part]] = []
    for part in parts:
        if part.text and runs and _go_together(runs[-1][-1], part):
            runs[-1].append(part)
        elif part.text:
            runs.append([part])
    return [replace(run[0], text="".join(part.text for part in run)) for run in runs]


def _go_together(part: Part, following: Part) -> bool:
    if part.kind == "content" and part.start + len(part.text) != following.start:
        return False
    return part.kind != "call" and (part.kind, part.call) == (following.kind, following.call)


def without_space(text: str) -> int:
    """Return the length of the text without its final white space.

    At most `MAX_HELD_SPACE` characters are subtracted.
    """
    return max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)


class CallStarts:
    """Finds the texts with which calls begin. Up to `MAX_BLANKS` blanks between two characters are ignored."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)

    def starts_at(self, text: str, start: int) -> bool | None:
        """Return whether one of the texts begins at `start`, or None if more text is needed."""
        seen, num_blanks = "", 0
        for place in range(start, len(text)):
            is_blank = text[place] in _BLANKS
            num_blanks = num_blanks + 1 if is_blank else 0
            seen += "" if is_blank else text[place]
            index = bisect_left(self._texts, seen)
            if num_blanks > MAX_BLANKS or index == len(self._texts) or not self._texts[index].startswith(seen):
                return False
            if self._texts[index] == seen:
                return True
        return None


class PlainParser:
    """Treats all text as content."""

    def __init__(self) -> None:
        self._num_chars = 0

    def feed(self, text: str) -> list[Part]:
        """See `AnswerParser`."""
        start, self._num_chars = self._num_chars, self._num_chars + len(text)
        return [Part("content", text, start=start)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Part]:  # noqa: ARG002
        """See `AnswerParser`."""
        return []


class ReasoningParser:
    """Emits the reasoning at the beginning of an answer, and passes the rest to `next_parser`.

    White space around the reasoning is dropped.

    is_open: True if the prompt ends with the opening marker.
    interrupts: Markers that end the reasoning because a call begins. See `ToolFormat.reasoning_ends`.
    """

    def __init__(
        self,
        next_parser: AnswerParser,
        *,
        is_open: bool,
        form: ReasoningForm = THINK,
        interrupts: Mapping[str, CallStarts] | None = None,
    ) -> None:
        self._next_parser = next_parser
        self._form = form
        self._interrupts = interrupts or {}
        self._ends = (form.closes, *self._interrupts)
        self._place: Literal["before", "inside", "after", "behind"] = "inside" if is_open else "before"
        self._pending = ""
        self._num_chars = 0
        self._num_chars_before = 0
        self._has_begun = False
        self._has_next_text = False

    def feed(self, text: str) -> list[Part]:
        """See `AnswerParser`."""
        self._pending += text
        self._num_chars += len(text)
        parts: list[Part] = []
        if self._place == "before":
            self._look_for_beginning()
        if self._place == "inside":
            self._take_reasoning(parts)
        if self._place == "after":
            self._pending = self._pending.lstrip()
            self._place = "behind" if self._pending else "after"
        if self._place == "behind":
            parts += self._feed_next()
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """See `AnswerParser`."""
        if is_cut and self._place in {"before", "inside"}:
            end, _ = self._end() if self._place == "inside" else (self._begun(self._form.opens), None)
            self._num_chars -= len(self._pending) - end
            self._pending = self._pending[:end]
        if self._place == "inside":
            return [Part("reasoning", self._pending, start=self._start)] if self._pending.strip() else []
        return joined([*self._feed_next(), *self._moved(self._next_parser.finish(is_cut=is_cut))])

    def _look_for_beginning(self) -> None:
        text = self._pending.lstrip()
        if len(self._pending) - len(text) > MAX_HELD_SPACE:
            self._place = "behind"
        elif text.startswith(self._form.opens):
            self._pending, self._place = text[len(self._form.opens) :], "inside"
        elif not self._form.opens.startswith(text):
            self._place = "behind"

    def _take_reasoning(self, parts: list[Part]) -> None:
        if not self._has_begun:
            self._pending = self._pending.lstrip()
            self._has_begun = bool(self._pending)
        end, mark = self._end()
        rest = self._pending[end:].removeprefix(self._form.closes)
        start, text = self._start, self._take(without_space(self._pending[:end]))
        if text:
            parts.append(Part("reasoning", text, start=start))
        if mark is not None:
            self._pending, self._place = rest, "after"

    def _end(self) -> tuple[int, str | None]:
        """Return (index at which the reasoning ends, end marker), or (index at which a marker may begin, None)."""
        start = 0
        while found := [(place, each) for each in self._ends if (place := self._pending.find(each, start)) >= 0]:
            place, mark = min(found)
            call_starts = self._interrupts.get(mark)
            is_end = call_starts is None or call_starts.starts_at(self._pending, place + len(mark))
            if is_end is not False:
                return place, mark if is_end else None
            start = place + 1
        return self._begun(*self._ends), None

    def _begun(self, *marks: str) -> int:
        return len(self._pending) - max(num_held_back_chars(self._pending, each) for each in marks)

    @property
    def _start(self) -> int:
        return self._num_chars - len(self._pending)

    def _feed_next(self) -> list[Part]:
        if not self._has_next_text:
            self._num_chars_before, self._has_next_text = self._start, bool(self._pending)
        return self._moved(self._next_parser.feed(self._take(len(self._pending))))

    def _moved(self, parts: list[Part]) -> list[Part]:
        return [replace(part, start=part.start + self._num_chars_before) for part in parts]

    def _take(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return text
