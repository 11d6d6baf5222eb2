"""What an answer's text is made of: reasoning, content, and calls of tools, told apart while it comes.

The parts of an answer are a function of its text alone, however it was cut into pieces: whole answers and streams go
through the same parsers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.engine.stop_strings import num_held_back_chars

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_HELD_SPACE = 256  # characters of white space that wait for what follows; more of it is text

PartKind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    content, reasoning: some more text of it. call: a call of a tool begins, text is the tool's name. arguments: some
    more of a call's arguments, as the model wrote them: JSON, if nothing cut it off. call: counts an answer's calls.
    start: the characters in front of it in the answer; content and reasoning begin there, a call there or behind.
    """

    kind: PartKind
    text: str
    call: int = 0
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How a family of models marks its reasoning.

    name: what it is chosen by. is_told_by_opens: other templates show what closes it, too.
    """

    name: str
    opens: str
    closes: str
    is_told_by_opens: bool = False


THINK = ReasoningForm("think", "<think>", "</think>")


class AnswerParser(Protocol):
    """Takes the text of one answer, piece by piece."""

    def feed(self, text: str) -> list[Part]:
        """Take some more text; return what is certain now."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back; of an answer that was cut off not what only begins a marker or a call."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind, content that stands together; leave out what is empty."""
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
    """Return where the white space at the end of a text begins, as far as it is held back."""
    return max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)


class PlainParser:
    """All text is content."""

    def __init__(self) -> None:
        self._num_chars = 0

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        start, self._num_chars = self._num_chars, self._num_chars + len(text)
        return [Part("content", text, start=start)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Part]:  # noqa: ARG002 - the signature is the protocol's
        """Nothing is held back."""
        return []


class ReasoningParser:
    """Splits off what stands between two marks at an answer's beginning.

    behind: takes the text that follows. is_open: the prompt ends with the first one, so the answer begins with
    reasoning. White space around both is nobody's, up to `MAX_HELD_SPACE`. interrupts: marks that end reasoning as
    well, and stand in the text that follows.
    """

    def __init__(
        self, behind: AnswerParser, *, is_open: bool, form: ReasoningForm = THINK, interrupts: Sequence[str] = ()
    ) -> None:
        self._behind = behind
        self._form = form
        self._ends = (form.closes, *interrupts)
        self._place: Literal["before", "inside", "after", "behind"] = "inside" if is_open else "before"
        self._pending = ""
        self._num_chars = 0  # of the whole text
        self._num_chars_before = 0  # of what stands before the text behind
        self._has_begun = False
        self._has_text_behind = False

    def feed(self, text: str) -> list[Part]:
        """Take some more text."""
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
            parts += self._feed_behind()
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back."""
        if is_cut and self._place in {"before", "inside"}:
            markers = (self._form.opens,) if self._place == "before" else self._ends
            num_dropped = max(num_held_back_chars(self._pending, each) for each in markers)
            self._pending = self._pending[: len(self._pending) - num_dropped]
            self._num_chars -= num_dropped
        if self._place == "inside":
            return [Part("reasoning", self._pending, start=self._start)] if self._pending.strip() else []
        return joined([*self._feed_behind(), *self._moved(self._behind.finish(is_cut=is_cut))])

    def _look_for_beginning(self) -> None:
        text = self._pending.lstrip()
        if len(self._pending) - len(text) > MAX_HELD_SPACE:
            self._place = "behind"
        elif text.startswith(self._form.opens):
            self._pending, self._place = text[len(self._form.opens) :], "inside"
        elif not self._form.opens.startswith(text):
            self._place = "behind"

    def _take_reasoning(self, parts: list[Part]) -> None:
        """Take what is certainly reasoning; white space and what may be the end are held back."""
        if not self._has_begun:
            self._pending = self._pending.lstrip()
            self._has_begun = bool(self._pending)
        found = [(place, each) for each in self._ends if (place := self._pending.find(each)) >= 0]
        end, mark = min(found, default=(0, None))
        if mark is None:
            end = len(self._pending) - max(num_held_back_chars(self._pending, each) for each in self._ends)
        rest = self._pending[end:].removeprefix(self._form.closes)
        start, text = self._start, self._take(without_space(self._pending[:end]))
        if text:
            parts.append(Part("reasoning", text, start=start))
        if mark is not None:
            self._pending, self._place = rest, "after"

    @property
    def _start(self) -> int:
        """The characters in front of what is pending."""
        return self._num_chars - len(self._pending)

    def _feed_behind(self) -> list[Part]:
        if not self._has_text_behind:
            self._num_chars_before, self._has_text_behind = self._start, bool(self._pending)
        return self._moved(self._behind.feed(self._take(len(self._pending))))

    def _moved(self, parts: list[Part]) -> list[Part]:
        """Place what was read behind the reasoning in the whole text."""
        return [replace(part, start=part.start + self._num_chars_before) for part in parts]

    def _take(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return text
