"""Call formats in which a call is a JSON object."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.server.answers.call_parser import ending
from octavo.server.answers.call_sections import SectionFormat, SectionParser
from octavo.server.answers.tool_format import choice_of, json_text, object_rules
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.tool_format import Function


class ObjectParser(SectionParser):
    """Reads calls that are JSON objects."""

    def __init__(self, form: ObjectFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        super().__init__(form, functions, only_one=only_one)
        self.name_key, self.arguments_keys = form.name_key, (form.arguments_key,)
        further = f"{form.between.strip()} {{"
        self._ends = ending(self._closes, form.opener, *form.strays, further, is_wrapped=True)

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._members(call)

    def _has_next_call(self) -> Wait[bool]:
        return (yield from super()._has_next_call()) if self._between else (yield from self._skip_space()) == "{"


class ObjectFormat(SectionFormat):
    """A call is a JSON object. id_key: Key of the call's number, or None if calls have no numbers."""

    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    id_key: ClassVar[str | None] = None
    parser_class = ObjectParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:
        """See `SectionFormat`."""
        counted = {} if self.id_key is None else {self.id_key: str(index)}
        return json_text({**counted, self.name_key: name, self.arguments_key: arguments})

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        id_key = json.dumps(json.dumps(self.id_key))
        counted = "" if self.id_key is None else f'{id_key} COLON /"[0-9]{{1,3}}"/ COMMA '
        return object_rules(functions, self.name_key, self.arguments_key, counted)


class GraniteFormat(ObjectFormat):
    """Granite 3."""

    name = "granite"
    markers = ("<|tool_call|>",)
    opener, opens, between, closes = "<|tool_call|>", "<|tool_call|>[", ", ", "]"


class Phi4MiniFormat(ObjectFormat):
    """Phi-4-mini."""

    name = "phi4_mini_json"
    markers = ("<|tool_call|>", "<|/tool_call|>")
    opener, opens, between, closes = "<|tool_call|>", "<|tool_call|>[", ", ", "]<|/tool_call|>"
    strays = ("functools[",)


class FunctoolsFormat(ObjectFormat):
    """Firefunction 2."""

    name = "functools"
    markers = ()
    opener, opens, between, closes = "functools", "functools[", ", ", "]"


class NemotronFormat(ObjectFormat):
    """Nemotron Nano 2."""

    name = "nemotron_json"
    markers = ("<TOOLCALL>", "</TOOLCALL>")
    opener, opens, between, closes = "<TOOLCALL>", "<TOOLCALL>[", ", ", "]</TOOLCALL>"


class ToolCallsListFormat(ObjectFormat):
    """Apriel, Jamba, Hunyuan."""

    name = "jamba"
    markers = ("<tool_calls>", "</tool_calls>")
    opener, opens, between, closes = "<tool_calls>", "<tool_calls>[", ", ", "]</tool_calls>"


class MiniMaxM1Format(ObjectFormat):
    """MiniMax M1."""

    name = "minimax"
    markers = ("<tool_calls>", "</tool_calls>")
    opener, opens, between, closes = "<tool_calls>", "<tool_calls>\n", "\n", "\n</tool_calls>"


class CohereFormat(ObjectFormat):
    """Command R7B, Command A."""

    name = "cohere_command3"
    markers = ("<|START_ACTION|>", "<|END_ACTION|>")
    opener, opens = "<|START_ACTION|>", "<|START_ACTION|>[\n    "
    between, closes = ",\n    ", "\n]<|END_ACTION|>"
    id_key, name_key, arguments_key = "tool_call_id", "tool_name", "parameters"


class CommandRFormat(ObjectFormat):
    """Command R, R+."""

    name = "command_r"
    markers = ()
    opener, opens = "Action:", "Action: ```json\n[\n    "
    between, closes = ",\n    ", "\n]```"
    name_key, arguments_key = "tool_name", "parameters"


class GigaChat3Format(ObjectFormat):
    """GigaChat 3.1."""

    name = "gigachat3"
    markers = ("<|function_call|>",)
    opener, opens, one_each = "<|function_call|>", "<|function_call|>", True


class OldGigaChat3Format(GigaChat3Format):
    """GigaChat 3."""

    markers = ("<|role_sep|>",)
    opener, opens = "function call<|role_sep|>", "function call<|role_sep|>\n"


class _KeyedParser(SectionParser):
    def __init__(self, form: SectionFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        super().__init__(form, functions, only_one=only_one)
        self._ends = ending(self._closes, form.opener, ", {", is_wrapped=True)

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._expect("{")
        yield from self._skip_space()
        name = yield from self._string()
        yield from self._expect(":")
        call.name = name
        yield from self._object_arguments(call)
        yield from self._takes_all("}")


class ApertusFormat(SectionFormat):
    """Apertus. The only key of a call is the tool's name."""

    name = "apertus"
    markers = ("<|tools_prefix|>", "<|tools_suffix|>")
    opener, opens, between, closes = "<|tools_prefix|>", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"
    parser_class = _KeyedParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """See `SectionFormat`."""
        return json_text({name: arguments})

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        rules = [choice_of(len(functions)), "COLON: /: ?/"]
        for index, function in enumerate(functions):
            name = json.dumps(json.dumps(function.name))
            rules.append(f'call{index}: "{{" {name} COLON {lark_json(function.parameters)} "}}"')
        return "\n".join(rules)
