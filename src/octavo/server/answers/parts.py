"""What an answer's text is made of: reasoning, content, and calls of tools, told apart while it comes.

The parts of an answer are a function of its text alone, however it was cut into pieces: whole answers and streams go
through the same parsers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.engine.stop_strings import num_held_back_chars

if TYPE_CHECKING:
    from collections.abc import Iterable

REASONING_OPENS = "<think>"
REASONING_CLOSES = "</think>"

MAX_HELD_SPACE = 256  # characters of white space that wait for what follows; more of it is text

PartKind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    content, reasoning: some more text of it. call: a call of a tool begins, text is the tool's name. arguments: some
    more of a call's arguments, as the model wrote them: JSON, if nothing cut it off. call: counts an answer's calls.
    """

    kind: PartKind
    text: str
    call: int = 0


class AnswerParser(Protocol):
    """Takes the text of one answer, piece by piece."""

    def feed(self, text: str) -> list[Part]:
        """Take some more text; return what is certain now."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back; of an answer that was cut off not what only begins a marker or a call."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind; leave out what is empty."""
    result: list[Part] = []
    for _, run in groupby(parts, key=lambda part: (part.kind, part.call)):
        same = [part for part in run if part.text]
        if same and same[0].kind == "call":
            result += same
        elif same:
            result.append(Part(same[0].kind, "".join(part.text for part in same), same[0].call))
    return result


def without_space(text: str) -> int:
    """Return where the white space at the end of a text begins, as far as it is held back."""
    return max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [Part("content", text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Part]:  # noqa: ARG002 - the signature is the protocol's
        """Nothing is held back."""
        return []


class ReasoningParser:
    """Splits off what stands between <think> and </think> at an answer's beginning.

    behind: takes the text that follows. is_open: the prompt ends with <think>, so the answer begins with reasoning.
    White space around both is nobody's, up to `MAX_HELD_SPACE`.
    """

    def __init__(self, behind: AnswerParser, *, is_open: bool) -> None:
        self._behind = behind
        self._place: Literal["before", "inside", "after", "behind"] = "inside" if is_open else "before"
        self._pending = ""
        self._has_begun = False

    def feed(self, text: str) -> list[Part]:
        """Take some more text."""
        self._pending += text
        parts: list[Part] = []
        if self._place == "before":
            self._look_for_beginning()
        if self._place == "inside":
            self._take_reasoning(parts)
        if self._place == "after":
            self._pending = self._pending.lstrip()
            self._place = "behind" if self._pending else "after"
        if self._place == "behind":
            parts += self._behind.feed(self._take(len(self._pending)))
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back."""
        if is_cut and self._place in {"before", "inside"}:
            marker = REASONING_OPENS if self._place == "before" else REASONING_CLOSES
            self._pending = self._pending[: len(self._pending) - num_held_back_chars(self._pending, marker)]
        rest = self._take(len(self._pending))
        if self._place == "inside":
            return [Part("reasoning", rest)] if rest.strip() else []
        return joined([*self._behind.feed(rest), *self._behind.finish(is_cut=is_cut)])

    def _look_for_beginning(self) -> None:
        text = self._pending.lstrip()
        if len(self._pending) - len(text) > MAX_HELD_SPACE:
            self._place = "behind"
        elif text.startswith(REASONING_OPENS):
            self._pending, self._place = text[len(REASONING_OPENS) :], "inside"
        elif not REASONING_OPENS.startswith(text):
            self._place = "behind"

    def _take_reasoning(self, parts: list[Part]) -> None:
        """Take what is certainly reasoning; white space and what may be the end are held back."""
        if not self._has_begun:
            self._pending = self._pending.lstrip()
            self._has_begun = bool(self._pending)
        end = self._pending.find(REASONING_CLOSES)
        is_over = end >= 0
        if not is_over:
            end = len(self._pending) - num_held_back_chars(self._pending, REASONING_CLOSES)
        text = self._take(without_space(self._pending[:end]))
        if text:
            parts.append(Part("reasoning", text))
        if is_over:
            self._pending = self._pending[self._pending.index(REASONING_CLOSES) + len(REASONING_CLOSES) :]
            self._place = "after"

    def _take(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return text
