"""Call formats that write a name, a marker, and the arguments as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.server.answers.call_parser import Call, MalformedError, ending
from octavo.server.answers.call_sections import SectionFormat, SectionParser
from octavo.server.answers.parts import CallStarts
from octavo.server.answers.tool_format import choice_of, json_text
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

_NAME = r"(?P<name>[\w.:/-]+)"
_INDEX_RULE = "/[0-9]{1,3}/"


class NamedParser(SectionParser):
    """Reads calls in a `NamedFormat`."""

    def __init__(self, form: NamedFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        super().__init__(form, functions, only_one=only_one)
        self._head_pattern = form.head_pattern
        self._arguments_open, self._call_closes = form.arguments_open.strip(), form.call_closes
        self._ends = ending(form.call_closes, form.closes, form.call_opens, form.opener)
        self._call_closers = (form.call_closes.strip(),)

    def _call_steps(self, call: Call) -> Wait[None]:
        head = self._head_pattern.fullmatch((yield from self._head(self._arguments_open)))
        if head is None:
            raise MalformedError
        call.name = head.group("name")
        yield from self._object_arguments(call)
        yield from self._takes_all(self._call_closes)


class NamedFormat(SectionFormat):
    """A call is `call_opens`, a head, `arguments_open`, the arguments and `call_closes`.

    head: Template of a head, with {name} and {index}.
    """

    head: ClassVar[str] = "{name}"
    head_pattern: ClassVar[re.Pattern[str]] = re.compile(rf"\s*{_NAME}\s*")
    arguments_open: ClassVar[str]
    call_closes: ClassVar[str] = ""
    parser_class = NamedParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:
        """See `SectionFormat`."""
        head = self.head.replace("{name}", name).replace("{index}", str(index))
        return f"{self.call_opens}{head}{self.arguments_open}{json_text(arguments)}{self.call_closes}"

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        rules = [choice_of(len(functions))]
        for index, function in enumerate(functions):
            before, _, after = f"{self.call_opens}{self.head}{self.arguments_open}".partition("{index}")
            places = [self._literal(each.replace("{name}", function.name)) for each in (before, after)]
            head = f" {_INDEX_RULE} ".join(each for each in places if each)
            rules.append(f"call{index}: {head} {lark_json(function.parameters)} {self._literal(self.call_closes)}")
        return "\n".join(rules)


class DeepSeekV3Format(NamedFormat):
    """DeepSeek V3, R1 and derived models."""

    name = "deepseek_v3"
    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    opener = opens = "<｜tool▁calls▁begin｜>"
    between, closes = "\n", "<｜tool▁calls▁end｜>"
    call_opens, strays = "<｜tool▁call▁begin｜>", ("<｜tool▁call▁begin｜>",)
    head, head_pattern = "function<｜tool▁sep｜>{name}", re.compile(rf"\s*\w+\s*<｜tool▁sep｜>\s*{_NAME}\s*")
    arguments_open, call_closes = "\n```json\n", "\n```<｜tool▁call▁end｜>"


class DeepSeekV31Format(NamedFormat):
    """DeepSeek V3.1."""

    name = "deepseek_v31"
    markers = DeepSeekV3Format.markers
    opener = opens = "<｜tool▁calls▁begin｜>"
    closes = "<｜tool▁calls▁end｜>"
    call_opens, strays = "<｜tool▁call▁begin｜>", ("<｜tool▁call▁begin｜>",)
    arguments_open, call_closes = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class KimiK2Format(NamedFormat):
    """Kimi K2."""

    name = "kimi_k2"
    markers = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    opener = opens = "<|tool_calls_section_begin|>"
    closes = "<|tool_calls_section_end|>"
    call_opens, strays = "<|tool_call_begin|>", ("<|tool_call_begin|>",)
    head, head_pattern = "functions.{name}:{index}", re.compile(r"\s*(?:functions\.)?(?P<name>[\w./:-]+?)(?::\d+)?\s*")
    arguments_open, call_closes = "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, CallStarts]:
        """See `ToolFormat`."""
        names = [f"{prefix}{each.name}" for each in functions for prefix in ("functions.", "")]
        call_starts = [f"{name}{end}" for name in names for end in (":", self.arguments_open)]
        return {
            self.call_opens: CallStarts(call_starts),
            self.opener: CallStarts(f"{self.call_opens}{head}" for head in call_starts),
        }


class SolarFormat(NamedFormat):
    """Solar Open."""

    name = "solar_open"
    markers = (
        "<|begin|>",
        "<|think|>",
        "<|content|>",
        "<|end|>",
        "<|calls|>",
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    )
    opener = opens = "<|tool_calls|>"
    frames = ("<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>")
    call_opens, strays = "<|tool_call:begin|>", ("<|tool_call:begin|>",)
    head, head_pattern = (
        "{index}<|tool_call:name|>{name}",
        re.compile(rf"\s*[\w-]+\s*<\|tool_call:name\|>\s*{_NAME}\s*"),
    )
    arguments_open, call_closes = "<|tool_call:args|>", "<|tool_call:end|>"


class FunctionaryFormat(NamedFormat):
    """Functionary 3.1, and Llama 3.1 if the prompt asks for this format."""

    name = "functionary_v3_1"
    markers = ("<function=", "</function>")
    opener = opens = "<function="
    one_each = True
    arguments_open, call_closes = ">", "</function>"
