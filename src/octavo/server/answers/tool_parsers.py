"""Parsers for `tool_formats`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo.server.answers.call_parser import Call, MalformedError, ToolParser, ending
from octavo.server.answers.parts import CallStarts

if TYPE_CHECKING:
    from octavo.server.answers.call_parser import Wait

_NAMED_START = re.compile(r"\s*([^\s\[]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*")
_MAX_HEAD_CHARS = 256
_LLAMA_STARTS = ('{"name":"', '{"type":"function","name":"')  # without white space


class HermesParser(ToolParser):
    """Reads <tool_call>{"name": ..., "arguments": ...}</tool_call> anywhere in the answer."""

    opener, closer = "<tool_call>", "</tool_call>"
    _ends = ending(closer, opener, is_wrapped=True)
    _call_openers, _call_closers = (opener,), (closer,)

    def _read(self) -> Wait[None]:
        while (yield from self._content(self.opener)):
            yield from self._skip_space()
            if (yield from self._call()):
                yield from self._takes_closer(self.closer)


class LlamaParser(ToolParser):
    """Reads {"name": ..., "parameters": ...}. Semicolons or line feeds separate calls.

    An object after other text is a call only if it begins with the name and the arguments.
    """

    opener = "<|python_tag|>"
    _ends = ending(";", "{", is_wrapped=True)
    _is_tagged = False

    def _read(self) -> Wait[None]:
        yield from self._skip_space()
        self._is_tagged = yield from self._takes(self.opener)
        if not self._is_tagged:
            self._drop_cut(self.opener)
        while (yield from self._object()):
            pass
        if self._is_at_cut():
            self._drop()
        names = [f'{head}{name}"' for head in _LLAMA_STARTS for name in self._names]
        call_starts = CallStarts(f'{name},"{key}":{{' for name in names for key in self.arguments_keys)
        while found := (yield from self._content(self.opener, "{")):
            start = self._position - (found == "{")
            if (yield from self._begins_with(start, call_starts)):
                self._position = start
                yield from self._object()
            else:
                self._report_content()

    def _object(self) -> Wait[bool]:
        if (yield from self._skip_space()) != "{" or not (yield from self._call()):
            return False
        yield from self._takes_next(";")
        yield from self._drop_space()
        return True

    def _is_cut_here(self) -> bool:
        if not super()._is_cut_here():
            return False
        begun = "".join(self._text.split())
        calls = (head + name for head in _LLAMA_STARTS for name in self._names)
        return self._is_tagged or any(call.startswith(begun) or begun.startswith(call + '"') for call in calls)


class MistralParser(ToolParser):
    """Reads [TOOL_CALLS] followed by a list of calls.

    Newer models write [TOOL_CALLS]name[ARGS]arguments for each call.
    """

    opener, arguments_marker = "[TOOL_CALLS]", "[ARGS]"
    _ends_in_list, _ends_named = ending("]", ", {", opener, is_wrapped=True), ending(opener)
    _call_openers = (opener,)

    def _read(self) -> Wait[None]:
        while (yield from self._content(self.opener)):
            match (yield from self._skip_space()):
                case "[":
                    self._ends = self._ends_in_list
                    self._position += 1
                    yield from self._list()
                case "{":
                    self._ends = self._ends_in_list
                    yield from self._call()
                case _:
                    self._ends = self._ends_named
                    yield from self._named()

    def _list(self) -> Wait[None]:
        while True:
            yield from self._skip_space()
            if not (yield from self._call()):
                return
            if not (yield from self._takes_next(",")):
                break
        yield from self._takes_closer("]")

    def _named(self) -> Wait[None]:
        if (yield from self._attempt(call := Call(), self._named_steps(call))):
            yield from self._drop_space()

    def _named_steps(self, call: Call) -> Wait[None]:
        start = self._position
        end = start + _MAX_HEAD_CHARS
        while (brace := self._text.find("{", start, end)) < 0 and len(self._text) < end and not self._is_over:
            yield
        head = None if brace < 0 else _NAMED_START.fullmatch(self._text, start, brace)
        call.name = None if head is None else head.group(1)
        self._read_head(call, head, brace)
        yield from self._report_arguments(call)

    def _read_head(self, call: Call, head: re.Match[str] | None, brace: int) -> None:
        """Move to the arguments. If the head is cut off or invalid, raise `MalformedError`."""
        if head is not None:
            self._position = brace
            return
        rest = self._text[self._position :]
        if self._is_cut and len(rest.split()) < 2 and "{" not in rest:
            cut = _NAMED_START.fullmatch(rest) if rest.rstrip().endswith(self.arguments_marker) else None
            call.name = None if cut is None else cut.group(1)
            self._position = len(self._text)
        raise MalformedError
