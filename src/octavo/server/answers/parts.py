"""What an answer's text is made of: reasoning, content, and calls of tools, told apart while it comes.

The parts of an answer are a function of its text alone, however it was cut into pieces: whole answers and streams go
through the same parsers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.engine.stop_strings import num_held_back_chars

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_HELD_SPACE = 256  # characters of white space that wait for what follows; more of it is text
MAX_BLANKS = 8  # that stand behind each other in the beginning of a call within a text
_BLANKS = " \t\r\n"

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


def joined(parts: Sequence[Part]) -> list[Part]:
    """Join neighbours of one kind, content only if it was adjacent in the text; drop empty parts."""
    if len(parts) == 1 and parts[0].text:  # as after most tokens
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
    """Return where the white space at the end of a text begins, as far as it is held back."""
    return max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)


class Heads:
    """Texts that calls begin with, without blanks: few of these may stand between their characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)

    def stand_at(self, text: str, start: int) -> bool | None:
        """Whether a text has one of them at some place; None where that is not known before there is more text."""
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
    well where one of these stands behind them; they belong to the text that follows.
    """

    def __init__(
        self,
        behind: AnswerParser,
        *,
        is_open: bool,
        form: ReasoningForm = THINK,
        interrupts: Mapping[str, Heads] | None = None,
    ) -> None:
        self._behind = behind
        self._form = form
        self._interrupts = interrupts or {}
        self._ends = (form.closes, *self._interrupts)
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
            end, _ = self._end() if self._place == "inside" else (self._begun(self._form.opens), None)
            self._num_chars -= len(self._pending) - end
            self._pending = self._pending[:end]
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
        end, mark = self._end()
        rest = self._pending[end:].removeprefix(self._form.closes)
        start, text = self._start, self._take(without_space(self._pending[:end]))
        if text:
            parts.append(Part("reasoning", text, start=start))
        if mark is not None:
            self._pending, self._place = rest, "after"

    def _end(self) -> tuple[int, str | None]:
        """Return where reasoning ends, and by which mark; where text begins that may become one, and None."""
        start = 0
        while found := [(place, each) for each in self._ends if (place := self._pending.find(each, start)) >= 0]:
            place, mark = min(found)
            heads = self._interrupts.get(mark)
            is_end = heads is None or heads.stand_at(self._pending, place + len(mark))
            if is_end is not False:
                return place, mark if is_end else None
            start = place + 1
        return self._begun(*self._ends), None

    def _begun(self, *marks: str) -> int:
        """Return where the text begins at whose end one of these may stand."""
        return len(self._pending) - max(num_held_back_chars(self._pending, each) for each in marks)

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
