"""Muse Glimmer's answers, which are messages with recipients. Calls are in tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.message_parser import MessageParser
from octavo.server.answers.tagged_calls import TaggedFormat
from octavo.server.answers.tagged_parser import TaggedParser
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.tool_format import Function

_BEGINS, _MESSAGE = "<|start|>assistant", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_RECIPIENT = re.compile(r"\bto=(\S+?)\s*(?=<\||$)")


class MuseGlimmerParser(MessageParser, TaggedParser):
    """Reads Muse Glimmer's messages."""

    begins, head_closes, ends = ("<|start|>", "to="), _MESSAGE, _ENDS

    def _addressee(self, head: str) -> tuple[str | None, Literal["reasoning", "content"]]:
        found = _RECIPIENT.search(head)
        recipient = "user" if found is None else found.group(1)
        return (
            None if recipient in self._form.reserved_names else recipient
        ), "reasoning" if recipient == "self" else "content"

    def _call_steps(self, call: Call) -> Wait[None]:
        if not (yield from self._takes_all(self._form.opens, self._form.call_opens)):
            raise MalformedError
        yield from super(MessageParser, self)._call_steps(call)
        yield from self._takes_all(self._form.closes)
        yield from self._takes_message_end()


class MuseGlimmerFormat(TaggedFormat):
    """The prompt ends with `<|start|>assistant`, so answers begin with ` to=`."""

    name = "muse_glimmer"
    markers = (
        "<|start|>",
        _MESSAGE,
        *_ENDS,
        "<atem:function_calls>",
        "</atem:function_calls>",
        "<atem:invoke",
        "</atem:invoke>",
        "<atem:parameter",
        "</atem:parameter>",
    )
    frames_content = reads_reasoning = True
    reserved_names = frozenset({"user", "self"})
    opener = opens = "<atem:function_calls>\n"
    closes = "\n</atem:function_calls>"
    call_opens, named, call_closes = '<atem:invoke name="', '">\n', "</atem:invoke>"
    argument_opens, argument_named = '<atem:parameter name="', '">'
    value_closes, argument_closes = "</atem:parameter>", "\n"
    parser_class = MuseGlimmerParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        bodies = [(name, self.write_call(index, name, arguments)) for index, (name, arguments) in enumerate(calls)]
        written = [f" to={name}{_MESSAGE}{self.opens}{body}{self.closes}" for name, body in bodies]
        return f"<|eom|>{_BEGINS}".join(written) + "<|eot|>"

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return f"start: begun? messages\n{self._messages(functions, only_one=only_one)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        more = f"({self._literal(f'<|eom|>{_BEGINS}')} messages | end)?"
        start = f"TEXT | begun? user SAID {more} | begun? messages"
        said = f"SAID: /(.|\\n)*/ {FEW_BLANKS} & ~/(.|\\n)*<\\|eo(.|\\n)*/"
        texts = f"TEXT: /([^< \\t\\r\\n](.|\\n)*)?/ {FEW_BLANKS} & ~/to=(.|\\n)*/\n{said}"
        return f"start: {start}\n{texts}\n{self._messages(functions, only_one=only_one)}"

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """See `ToolFormat`."""
        start = f"start: begun? messages | (begun? user)? content end?\ncontent: {lark_json(schema)}"
        return f"{start}\n{self._messages(functions, only_one=only_one)}"

    def content(self, schema: str) -> str:
        """See `ToolFormat`."""
        return f"start: (begun? user)? content end?\ncontent: {lark_json(schema)}\n{self._call_starts()}"

    def _messages(self, functions: Sequence[Function], *, only_one: bool) -> str:
        more = "" if only_one else f" ({self._literal(f'<|eom|>{_BEGINS}')} message)*"
        opens, closes = self._literal(self.opens), self._literal(self.closes)
        message = " | ".join(f"message{index}" for index in range(len(functions)))
        rules = [
            f"messages: message{more} end?",
            f"message: {message}",
            self._call_starts(),
            self.call_rules(functions),
        ]
        for index, function in enumerate(functions):
            head = f"/ ?to={pattern(function.name)}/ {self._literal(_MESSAGE)}"
            rules.append(f"message{index}: {head} {opens} call{index} {closes}")
        return "\n".join(rules)

    def _call_starts(self) -> str:
        ends = " | ".join(map(self._literal, _ENDS))
        return f"begun: {self._literal(_BEGINS)}\nuser: / ?to=user/ {self._literal(_MESSAGE)}\nend: {ends}"
