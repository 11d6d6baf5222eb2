"""Base of call formats with sections."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.server.answers.call_parser import Call, MalformedError, ToolParser
from octavo.server.answers.list_members import member_end
from octavo.server.answers.tool_format import ToolFormat, json_text
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

NAME = re.compile(r"[\w.:/-]*")
_MAX_FRAMES = 2
MAX_HEAD_CHARS = 256


class SectionFormat(ToolFormat):
    """A section is `opens`, calls separated by `between`, and `closes`. White space in these markers is optional.

    opener: Beginning of `opens`, for which the parser searches.
    strays: Markers that begin a call outside of a section.
    one_each: True if each call has its own section.
    frames: Markers around content or before calls. The parser drops these markers.
    """

    opens: ClassVar[str]
    opener: ClassVar[str]
    closes: ClassVar[str] = ""
    between: ClassVar[str] = ""
    call_opens: ClassVar[str] = ""
    one_each: ClassVar[bool] = False
    strays: ClassVar[tuple[str, ...]] = ()
    frames: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.frames_content = cls.frames_content or bool(cls.frames)

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        written = [self.write_call(index, name, arguments) for index, (name, arguments) in enumerate(calls)]
        between = f"{self.closes}{self.between}{self.opens}" if self.one_each else self.between
        return self.opens + between.join(written) + self.closes

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:
        """Write one call. index: Counted from 0."""
        raise NotImplementedError

    def call_rules(self, functions: Sequence[Function]) -> str:
        """Return grammar rules that define `call`. Arguments come in the schema's order."""
        raise NotImplementedError

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        opens, between = self._literal(self.opens), self._literal(self.between)
        more = f" ({between} {opens} section)*" if self.one_each and not only_one else ""
        start = self._framed(f"{opens} section{more}")
        return f"start: {start}\n{self._section(functions, only_one=only_one)}\n{self._frame_rule()}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        framed = [f"framed{index}" for index in range(len(self.frames))]
        text = "TEXT" if not framed else f"({' | '.join(framed)})* TEXT"
        several = " | ".join(["head rest", *framed])
        start = f"{text} | {text.removesuffix('TEXT')} head rest" if only_one else f"({several})* TEXT"
        rest = f"rest: {self._literal(self.opens.removeprefix(self.opener))} section {self._frames()}"
        rules = [f"start: {start}", self._text_after(self.opener), rest, self._section(functions, only_one=only_one)]
        return "\n".join([*rules, self._frame_rule(), *map(self._text_and, framed, self.frames)])

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """See `ToolFormat`."""
        grammar = super().or_content(functions, schema, only_one=only_one)
        return grammar.replace("start: calls | content", f"start: calls | {self._framed('content')}", 1)

    def content(self, schema: str) -> str | None:
        """See `ToolFormat`."""
        if not self.frames:
            return None
        return f"start: {self._framed('content')}\ncontent: {lark_json(schema)}\n{self._frame_rule()}"

    def _framed(self, rule: str) -> str:
        return f"{self._frames()} {rule} {self._frames()}" if self.frames else rule

    def _frames(self) -> str:
        return f"frame{{0,{_MAX_FRAMES}}}" if self.frames else ""

    def _frame_rule(self) -> str:
        return f"frame: {' | '.join(map(self._literal, self.frames))}" if self.frames else ""

    def _text_and(self, rule: str, mark: str) -> str:
        first, *_ = self._pieces(mark)
        is_token = first in self.markers and self._token_name(first) is not None
        return f"{rule}{'' if is_token else '[lazy]'}: TEXT {self._literal(mark) if is_token else json_text(mark)}"

    def _section(self, functions: Sequence[Function], *, only_one: bool) -> str:
        more = "" if only_one or self.one_each else f" ({self._literal(self.between)} call)*"
        return f"section: call{more} {self._literal(self.closes)}\n{self.call_rules(functions)}"


class SectionParser(ToolParser):
    """Reads calls in sections. A section without a call is content."""

    def __init__(self, form: SectionFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        super().__init__(form, functions, only_one=only_one)
        self._openers = (form.opener, *form.strays, *form.frames)
        self._frames = form.frames
        self._opens = form.opens.removeprefix(form.opener)
        self._call_opens, self._between = form.call_opens, form.between.strip()
        # Some models write blanks after the bracket that ends a list.
        self._closes = form.closes.replace("]", "] ", 1)
        self._one_each = form.one_each
        self._is_list = not form.one_each and not form.call_opens
        marks = (form.opener.strip(), form.call_opens.strip(), *form.strays)
        self._call_openers = tuple(each for each in marks if len(each) > 1)
        self._call_closers = tuple(each for each in (form.closes.strip(),) if len(each) > 1)

    def _read(self) -> Wait[None]:
        while opener := (yield from self._content(*self._openers)):
            if opener in self._frames:
                self._drop()
                if not (yield from self._skip_space()):
                    self._drop()
                continue
            if opener == self._openers[0] and not (yield from self._takes_all(self._opens, self._call_opens)):
                self._report_content()
                continue
            yield from self._calls()

    def _calls(self) -> Wait[None]:
        while True:
            is_call = yield from self._attempt(call := Call(), self._call_steps(call))
            if not is_call and not (self._is_list and (yield from self._skips_broken_member())):
                return
            self._end_member()
            if self._one_each or not (yield from self._has_next_call()):
                break
        if is_call:
            yield from self._takes_section_end()

    def _end_member(self) -> None:
        """Called after each call."""

    def _skips_broken_member(self) -> Wait[bool]:
        """Emit a malformed call in a list as content. Return False if the call's end is uncertain."""
        while not self._is_over:
            yield
        num_chars = member_end(self._broken + self._text)
        if num_chars is None or num_chars < len(self._broken):
            return False
        self._position = num_chars - len(self._broken)
        self._report_content()
        return True

    def _has_next_call(self) -> Wait[bool]:
        marks = (self._between, self._call_opens)
        return any(marks) and (yield from self._takes_all(*marks))

    def _takes_section_end(self) -> Wait[None]:
        yield from self._takes_all(self._closes)
        yield from self._drop_space()

    def _takes_all(self, *marks: str) -> Wait[bool]:
        for mark in (word for each in marks for word in each.split()):
            if not (yield from self._takes_next(mark)):
                self._drop_cut(mark)
                return False
        return True

    def _call_steps(self, call: Call) -> Wait[None]:
        raise NotImplementedError

    def _head(self, marker: str) -> Wait[str]:
        while True:
            most = self._position + MAX_HEAD_CHARS + len(marker)
            end = self._text.find(marker, self._position, most)
            if end >= 0:
                head = self._text[self._position : end]
                self._position = end + len(marker)
                return head
            if self._is_over or len(self._text) >= most:
                if self._is_cut and len(self._text) < most:
                    self._position = len(self._text)
                raise MalformedError
            yield
