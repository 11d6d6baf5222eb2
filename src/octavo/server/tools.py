"""The tools of a request: what it may call, whether it must, and what that means for its prompt and its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.parts import PlainParser
from octavo.server.tool_formats import Function

if TYPE_CHECKING:
    from octavo.server.parts import AnswerParser
    from octavo.server.tool_formats import ToolFormat

MAX_TOOLS = 128  # as the OpenAI API
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What one request may call. `given`: as chat templates read them; `named`: the one that it must call.

    Without a format nothing is called.
    """

    functions: tuple[Function, ...] = ()
    given: tuple[dict[str, Any], ...] = ()
    is_required: bool = False
    named: str | None = None
    only_one: bool = False
    format: ToolFormat | None = None

    @classmethod
    def make(
        cls,
        described: list[tuple[Function, str]],
        format: ToolFormat | None,  # noqa: A002 - the field's name
        *,
        choice: str = "auto",
        named: str | None = None,
        only_one: bool = False,
    ) -> Toolbox:
        """Collect tools with their descriptions. choice: auto, none, required. Raises `RequestError`."""
        if len(described) > MAX_TOOLS:
            raise RequestError(f"{len(described)} tools are given; the limit is {MAX_TOOLS}", parameter="tools")
        functions = tuple(function for function, _ in described)
        names = [function.name for function in functions]
        if len({*names}) < len(names):
            raise RequestError("two tools have the same name", parameter="tools")
        if named is not None and named not in names:
            raise RequestError(f"tool_choice names {named[:64]!r}, which is none of the tools", parameter="tool_choice")
        if choice == "required" and not names:
            raise RequestError("tool_choice needs tools", parameter="tool_choice")
        if choice == "none" or not names:
            return cls()
        if format is None:
            message = "this model's chat template shows no form of tool calls that is known; see --tool-call-parser"
            raise RequestError(message, parameter="tools")
        given = tuple(_as_template_reads(function, description) for function, description in described)
        return cls(functions, given, choice == "required" or named is not None, named, only_one, format)

    def parser(self) -> AnswerParser:
        """Return what reads an answer."""
        if self.format is None:
            return PlainParser()
        return self.format.parser(frozenset(function.name for function in self.functions), only_one=self.only_one)

    def structure(self, content: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the form that the answer must have. content: the one asked for where no tool is called."""
        if self.format is None:
            return content
        only_one = self.only_one
        if self.is_required:
            wanted = [each for each in self.functions if self.named in {None, each.name}]
            grammar = self.format.forced(wanted, only_one=only_one or self.named is not None)
        elif content is not None:
            if content.json is None and content.json_object is None:
                raise RequestError("tools go with JSON only, with no other structure", parameter="structured_outputs")
            schema = str(content.json or '{"type": "object"}')
            grammar = self.format.or_content(self.functions, schema, only_one=only_one)
        elif any(function.strict for function in self.functions):
            grammar = self.format.optional(self.functions, only_one=only_one)
        else:
            return None
        try:
            return StructuredOutputsParams(grammar=grammar)
        except RequestError:
            raise RequestError("the parameters of the tools are too long", parameter="tools") from None


NO_TOOLS = Toolbox()


def read_function(fields: Any, place: str, parameters_name: str = "parameters") -> tuple[Function, str]:
    """Check the description of a tool. Raises `RequestError` with the place."""
    if not isinstance(fields, dict):
        raise RequestError(f"{place} must be an object with a name", parameter=place)
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{place}.name must be 1 to 64 letters, digits and any of _ - . : /"
        raise RequestError(message, parameter=f"{place}.name")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{place}.description must be a string", parameter=f"{place}.description")
    parameters = fields.get(parameters_name)
    if parameters is not None and not isinstance(parameters, dict):
        parameter = f"{place}.{parameters_name}"
        raise RequestError(f"{parameter} must be a JSON schema", parameter=parameter)
    return Function(name, parameters or _NO_PARAMETERS, fields.get("strict") is True), description or ""


def read_chat_tools(
    tools: Any, tool_choice: Any, parallel_tool_calls: bool | None, tool_format: ToolFormat | None
) -> Toolbox:
    """Read the fields of /v1/chat/completions. Raises `RequestError`."""
    described = []
    for index, tool in enumerate(tools or []):
        place = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f'{place} must be {{"type": "function", "function": ...}}', parameter=place)
        described.append(read_function(tool.get("function"), f"{place}.function"))
    choice, named = "auto", None
    if isinstance(tool_choice, dict):
        function = tool_choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if tool_choice.get("type") != "function" or not isinstance(named, str):
            _refuse_choice()
    elif isinstance(tool_choice, str) and tool_choice in {"none", "auto", "required"}:
        choice = tool_choice
    elif tool_choice is not None:
        _refuse_choice()
    only_one = parallel_tool_calls is False
    return Toolbox.make(described, tool_format, choice=choice, named=named, only_one=only_one)


def _refuse_choice() -> NoReturn:
    message = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
    raise RequestError(message, parameter="tool_choice")


def _as_template_reads(function: Function, description: str) -> dict[str, Any]:
    fields = {"name": function.name, "description": description, "parameters": function.parameters}
    return {"type": "function", "function": fields}
