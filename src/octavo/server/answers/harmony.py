"""The messages of gpt-oss: each says in its head whether it is reasoning, content or a call of a tool."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.call_parser import Call, MalformedError, ToolParser
from octavo.server.answers.call_sections import MAX_HEAD_CHARS
from octavo.server.answers.parts import Part
from octavo.server.answers.tool_format import ToolFormat, choice_of, json_text
from octavo.structured_output.lark import FEW_BLANKS, lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyFormat(ToolFormat):
    """A call is a message to a function; what ends it ends the answer, so there is one."""

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
    takes_one = True
    frames_content = reads_reasoning = True

    def parser(self, functions: Sequence[Function], *, only_one: bool = False) -> HarmonyParser:
        """Return what reads messages."""
        return HarmonyParser(frozenset(each.name for each in functions), only_one=only_one)

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Messages, as the model is told to write them."""
        return "<|start|>assistant".join(
            f"{self._head(name)}{json_text(arguments)}<|call|>" for name, arguments in calls
        )

    def shows(self, text: str, name: str) -> bool:
        """Chat templates write a recipient before the channel, models behind it."""
        return f"to=functions.{name}<|channel|>commentary" in text

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Messages to functions."""
        return f"start: begun? {self._calls(functions, only_one=only_one)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """A message to the user, or messages to functions; text without a head is one to the user."""
        start = f"start: TEXT | begun? {self._literal('<|channel|>final' + _MESSAGE)} SAID | begun? "
        texts = f"TEXT: /([^< \\t\\r\\n](.|\\n)*)?/ {FEW_BLANKS}\nSAID: /(.|\\n)*/ {FEW_BLANKS}"
        return f"{start}{self._calls(functions, only_one=only_one)}\n{texts}"

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """The JSON is a message to the user."""
        start = f"start: begun? {self._literal('<|channel|>final' + _MESSAGE)} content | {lark_json(schema)} | begun? "
        return f"{start}{self._calls(functions, only_one=only_one)}\ncontent: {lark_json(schema)}"

    def content(self, schema: str) -> str:
        """Return the grammar of an answer that is JSON of a schema."""
        head = self._literal("<|channel|>final" + _MESSAGE)
        return f"start: begun? {head} content\ncontent: {lark_json(schema)}\n{self._begun()}"

    def _calls(self, functions: Sequence[Function], *, only_one: bool) -> str:
        end = self._literal("<|call|>")
        more = "" if only_one else f" ({self._literal('<|start|>assistant')} call)*"
        rules = [f"call{more}", self._begun(), choice_of(len(functions))]
        for index, function in enumerate(functions):
            rules.append(f"call{index}: {self._literal(self._head(function.name))} json{index} {end}?")
            rules.append(f"json{index}: {lark_json(function.parameters)}")
        return "\n".join(rules)

    def _begun(self) -> str:
        return f"begun: {self._literal('<|start|>assistant')}"

    @staticmethod
    def _head(name: str) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json{_MESSAGE}"


class HarmonyParser(ToolParser):
    """Reads messages; what begins like none is content to its end.

    A message to a function that there is not, or that is no object, is what its channel says: reasoning or content.
    """

    def _read(self) -> Wait[None]:
        while (yield from self._begins()):
            try:
                head = yield from self._message_head()
            except MalformedError:
                break
            self._drop()
            recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
            name = None if recipient is None else recipient.group(1).removeprefix("functions.")
            if name in self._names and (yield from self._attempt(call := Call(name), self._call_steps(call))):
                continue
            is_thought = channel is not None and channel.group(1) == "analysis"
            yield from self._body("reasoning" if is_thought else "content")
        yield from self._rest_is_content()

    def _begins(self) -> Wait[bool]:
        """Whether a message does."""
        yield from self._skip_space()
        while True:
            seen = self._text[self._position :]
            if any(seen.startswith(each) for each in _BEGINS):
                return True
            if self._is_over or not any(each.startswith(seen) for each in _BEGINS):
                if self._is_cut and any(each.startswith(seen) for each in _BEGINS):
                    self._position = len(self._text)
                    self._drop()
                return False
            yield

    def _message_head(self) -> Wait[str]:
        while (end := self._text.find(_MESSAGE)) < 0:
            if self._is_over or len(self._text) > MAX_HEAD_CHARS + len(_MESSAGE):
                if self._is_cut and len(self._text) <= MAX_HEAD_CHARS + len(_MESSAGE):
                    self._position = len(self._text)
                    self._drop()
                raise MalformedError
            yield
        if end > MAX_HEAD_CHARS:
            raise MalformedError
        self._position = end + len(_MESSAGE)
        return self._text[:end]

    def _call_steps(self, call: Call) -> Wait[None]:
        if (yield from self._skip_space()) != "{":
            raise MalformedError
        yield from self._tell_arguments(call)
        yield from self._skip_space()
        for end in _ENDS:
            if (yield from self._takes(end)):
                break
            self._drop_cut(end)

    def _body(self, kind: str) -> Wait[None]:
        """Tell a message up to its end."""
        while True:
            ends = [(place, end) for end in _ENDS if (place := self._text.find(end)) >= 0]
            if ends:
                place, end = min(ends)
            else:
                is_whole = self._is_over and not self._is_cut
                num_held_back = 0 if is_whole else max(num_held_back_chars(self._text, each) for each in _ENDS)
                place, end = len(self._text) - num_held_back, ""
            text = self._text[:place]
            self._parts.append(Part("reasoning" if kind == "reasoning" else "content", text, start=self._num_told))
            self._position = place + len(end)
            self._drop()
            if end:
                return
            if self._is_over:
                self._position = len(self._text)
                self._drop()
                return
            yield
