"""Tool calls of gpt-oss, in the Harmony format."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from octavo.server.answers.call_parser import ending
from octavo.server.answers.message_parser import MessageParser
from octavo.server.answers.tool_format import ToolFormat, choice_of, json_text
from octavo.structured_output.lark import FEW_BLANKS, lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.tool_format import Function

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")
_CHANNELS = ("analysis", "commentary", "final")
_BARE_HEAD = re.compile(
    rf"\s*(?:<\|start\|>assistant)?<\|channel\|>\s*({'|'.join(_CHANNELS)})(?=\s|<\||\Z)\s*(?!\s|to=|<\|constrain\|>)"
)
_CHANNEL = re.compile(rf"(?:<\|channel\|>|^)\s*({'|'.join(_CHANNELS)})\b")


class HarmonyParser(MessageParser):
    """Reads gpt-oss's messages."""

    begins = (
        *("<|start|>", "<|channel|>", "to=", _MESSAGE),
        *(f"assistant{each}" for each in ("<|channel|>", " to=")),
        *(f"{channel}{mark}" for channel in _CHANNELS for mark in (_MESSAGE, " to=")),
    )
    head_parts = ("to=", "<|constrain|>")
    head_closes, ends, breaks = _MESSAGE, _ENDS, ("<|start|>assistant",)
    _ends = ending(*_ENDS)
    _call_openers, _call_closers = ("<|start|>", "<|channel|>"), _ENDS

    def _addressee(self, head: str) -> tuple[str | None, Literal["reasoning", "content"]]:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        name = None if recipient is None else recipient.group(1).removeprefix("functions.")
        return name, "reasoning" if channel is not None and channel.group(1) == "analysis" else "content"

    def _bare_head(self) -> tuple[int, Literal["reasoning", "content"]] | None:
        found = _BARE_HEAD.match(self._text)
        if found is None:
            return None
        return found.end(), "reasoning" if found.group(1) == "analysis" else "content"

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._object_arguments(call)
        yield from self._takes_message_end()


class HarmonyFormat(ToolFormat):
    """A call is a message to a function. The call's end marker also ends the answer, so an answer has one call."""

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
    takes_one = True
    frames_content = reads_reasoning = True
    parser_class = HarmonyParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`. Chat templates write calls differently."""
        return "<|start|>assistant".join(
            f"{self._head(name)}{json_text(arguments)}<|call|>" for name, arguments in calls
        )

    def shows(self, text: str, name: str) -> bool:
        """See `ToolFormat`. Chat templates write the recipient before the channel."""
        return f"to=functions.{name}<|channel|>commentary" in text

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return f"start: begun? {self._calls(functions, only_one=only_one)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        start = f"start: TEXT | begun? {self._literal('<|channel|>final' + _MESSAGE)} SAID | begun? "
        texts = f"TEXT: /([^< \\t\\r\\n](.|\\n)*)?/ {FEW_BLANKS}\nSAID: /(.|\\n)*/ {FEW_BLANKS}"
        return f"{start}{self._calls(functions, only_one=only_one)}\n{texts}"

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """See `ToolFormat`."""
        start = f"start: begun? {self._literal('<|channel|>final' + _MESSAGE)} content | {lark_json(schema)} | begun? "
        return f"{start}{self._calls(functions, only_one=only_one)}\ncontent: {lark_json(schema)}"

    def content(self, schema: str) -> str:
        """See `ToolFormat`."""
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
