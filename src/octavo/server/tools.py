"""The tools of a request: what it may call, whether it must, and what that means for its prompt and its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.parts import PlainParser
from octavo.server.tool_formats import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.server.parts import AnswerParser
    from octavo.server.tool_formats import ToolFormat

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY = {"type": "object"}
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
        parallel: bool | None = None,
    ) -> Toolbox:
        """Collect tools with their descriptions. Raises `RequestError`.

        choice: auto, none, required. parallel: whether there may be several calls; None for what the family is used to.
        """
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
        only_one = format.takes_one if parallel is None else not parallel
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
        if content is not None and content.json is None and content.json_object is None:
            raise RequestError("tools go with JSON only, with no other structure", parameter="structured_outputs")
        starts_after = None if content is None else content.starts_after
        try:
            grammar = self._grammar(self.format, content)
            return None if grammar is None else StructuredOutputsParams(grammar=grammar, starts_after=starts_after)
        except (RequestError, ValueError, TypeError, RecursionError):
            message = (
                "the parameters of the tools, or the schema beside them, are no JSON schemas, too long or too deep"
            )
            raise RequestError(message, parameter="tools") from None

    def _grammar(self, tool_format: ToolFormat, content: StructuredOutputsParams | None) -> str | None:
        if self.is_required:
            wanted = [each for each in self.functions if self.named in {None, each.name}]
            return tool_format.forced(wanted, only_one=self.only_one or self.named is not None)
        if content is not None:
            schema = str(content.json or '{"type": "object"}')
            return tool_format.or_content(self.functions, schema, only_one=self.only_one)
        if any(function.strict for function in self.functions):
            functions = [each if each.strict else replace(each, parameters=_ANY) for each in self.functions]
            return tool_format.optional(functions, only_one=self.only_one)
        return None


NO_TOOLS = Toolbox()


def read_function(fields: Any, place: str, parameters_name: str = "parameters") -> tuple[Function, str]:
    """Check the description of a tool. Raises `RequestError` with the place."""
    if not isinstance(fields, dict):
        raise RequestError(f"{place} must be an object with a name", parameter=place)
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{place}.name must be 1 to 128 letters, digits and any of _ - . : /"
        raise RequestError(message, parameter=f"{place}.name")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{place}.description must be a string", parameter=f"{place}.description")
    parameters = fields.get(parameters_name)
    kind = (
        "object" if parameters is None else parameters.get("type", "object") if isinstance(parameters, dict) else None
    )
    if kind != "object":
        parameter = f"{place}.{parameters_name}"
        raise RequestError(f"{parameter} must be a JSON schema of an object", parameter=parameter)
    schema = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return Function(name, schema, fields.get("strict") is True), description or ""


def read_choice(wanted: Any, name_of: Callable[[dict[str, Any]], Any]) -> tuple[str, str | None]:
    """Read OpenAI's tool_choice: auto, none, required, and the name of the tool that must be called."""
    if wanted is None:
        return "auto", None
    if isinstance(wanted, str) and wanted in {"none", "auto", "required"}:
        return wanted, None
    named = name_of(wanted) if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    if not isinstance(named, str):
        message = 'tool_choice must be none, auto, required or {"type": "function", ...} with the name of a tool'
        raise RequestError(message, parameter="tool_choice")
    return "required", named


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
    choice, named = read_choice(tool_choice, _name_in_function)
    return Toolbox.make(described, tool_format, choice=choice, named=named, parallel=parallel_tool_calls)


def _name_in_function(wanted: dict[str, Any]) -> Any:
    function = wanted.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _as_template_reads(function: Function, description: str) -> dict[str, Any]:
    fields = {"name": function.name, "description": description, "parameters": function.parameters}
    return {"type": "function", "function": fields}
