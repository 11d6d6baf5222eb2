"""Base of the parsers of messages. A message is a head, a text and an end marker. The head names the recipient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.call_parser import HALF, Call, MalformedError, ToolParser
from octavo.server.answers.call_sections import MAX_HEAD_CHARS
from octavo.server.answers.parts import Part

if TYPE_CHECKING:
    from octavo.server.answers.call_parser import Wait


class MessageParser(ToolParser):
    """Reads messages. Text without a head is content.

    If the recipient is no known function, the head decides whether the text is content or reasoning.

    breaks: Markers that end a message and begin the next one.
    """

    begins: ClassVar[tuple[str, ...]]
    breaks: ClassVar[tuple[str, ...]] = ()
    head_parts: ClassVar[tuple[str, ...]] = ()
    head_closes: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]

    def _addressee(self, head: str) -> tuple[str | None, Literal["reasoning", "content"]]:
        """Return (called function or None, kind of the text)."""
        raise NotImplementedError

    def _bare_head(self) -> tuple[int, Literal["reasoning", "content"]] | None:
        """Return (length of a head without `head_closes`, kind of the text), or None."""
        return None

    def _call_steps(self, call: Call) -> Wait[None]:
        raise NotImplementedError

    def _read(self) -> Wait[None]:
        while True:
            if not (yield from self._begins()):
                if self._is_over and self._position == len(self._text):
                    return
                yield from self._body("content")
                continue
            try:
                head = yield from self._message_head()
            except MalformedError:
                if (bare := self._bare_head()) is None:
                    break
                self._position, kind = bare
                self._drop()
                yield from self._body(kind)
                continue
            self._drop()
            name, kind = self._addressee(head)
            if name in self._names and (yield from self._attempt(call := Call(name), self._call_steps(call))):
                continue
            yield from self._body(kind)
        yield from self._rest_is_content()

    def _begins(self) -> Wait[bool]:
        yield from self._skip_space()
        return bool((yield from self._follows(self.begins)))

    def _message_head(self) -> Wait[str]:
        while (end := self._text.find(self.head_closes)) < 0:
            if self._is_over or len(self._text) > MAX_HEAD_CHARS + len(self.head_closes):
                if self._is_cut and len(self._text) <= MAX_HEAD_CHARS + len(self.head_closes):
                    self._drop_cut_head()
                raise MalformedError
            yield
        head = self._text[:end].strip()
        if end > MAX_HEAD_CHARS or any(mark in head for mark in ("{", "\n", *self.ends)):
            raise MalformedError
        self._position = end + len(self.head_closes)
        return self._text[:end]

    def _drop_cut_head(self) -> None:
        bare = self._bare_head()
        rest = "" if bare is None else self._text[bare[0] :].rstrip(HALF)
        if not rest or any(each.startswith(rest) for each in (*self.head_parts, self.head_closes)):
            self._drop_rest()
        else:
            self._text = self._text[: len(self._text) - num_held_back_chars(self._text, self.head_closes)]

    def _takes_message_end(self) -> Wait[None]:
        yield from self._skip_space()
        for end in self.ends:
            if (yield from self._takes(end)):
                break
            self._drop_cut(end)

    def _body(self, kind: Literal["reasoning", "content"]) -> Wait[None]:
        while True:
            ends = [(place, end) for end in self.ends if (place := self._text.find(end)) >= 0]
            ends += [(place, "") for each in self.breaks if (place := self._text.find(each)) >= 0]
            if ends:
                place, end = min(ends)
                is_ended = True
            else:
                is_ended = False
                is_whole = self._is_over and not self._is_cut
                marks = (*self.ends, *self.breaks)
                num_held_back = 0 if is_whole else max(num_held_back_chars(self._text, each) for each in marks)
                place, end = len(self._text) - num_held_back, ""
            text = self._text[:place]
            self._parts.append(Part(kind, text, start=self._num_reported))
            self._position = place + len(end)
            self._drop()
            if is_ended:
                return
            if self._is_over:
                self._drop_rest()
                return
            yield
