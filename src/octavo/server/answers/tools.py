"""The tools of a request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from octavo.server.answers.argument_values import LookaheadError
from octavo.server.answers.parts import PlainParser
from octavo.server.answers.tool_format import Function
from octavo.structured_output.lark import lark_json
from octavo.structured_output.schema_faults import FIELD, LENIENT, place_of_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.server.answers.parts import AnswerParser
    from octavo.server.answers.tool_format import ToolFormat

MAX_TOOLS = 1024
NAME_PATTERN = "[A-Za-z0-9_.:/-]{1,128}"
_NAME = re.compile(NAME_PATTERN)
_ANY = {"type": "object"}
_NEEDS_TOOLS = "tool_choice needs tools"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's `tool_choice`.

    mode: "auto", "none" or "required".
    named: Tool that must be called, or None.
    allowed: Tools that may be called, or None for all.
    """

    mode: str = "auto"
    named: str | None = None
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A request's tools.

    functions: Tools that may be called.
    given: All tools, in the form that chat templates expect.
    is_limited: True if some tools of `given` may not be called.
    is_required: True if the answer must have a call.
    format: None if no tool may be called.
    """

    functions: tuple[Function, ...] = ()
    given: tuple[dict[str, Any], ...] = ()
    is_limited: bool = False
    is_required: bool = False
    named: str | None = None
    only_one: bool = False
    format: ToolFormat | None = None

    @classmethod
    def make(
        cls,
        described: list[tuple[Function, str]],
        format: ToolFormat | None,  # noqa: A002 - the field's name
        choice: Choice | None = None,
        *,
        parallel: bool | None = None,
    ) -> Toolbox:
        """Make a toolbox. Raises `RequestError`.

        parallel: True to allow several calls in an answer, or None for the format's default.
        """
        choice = choice or Choice()
        if len(described) > MAX_TOOLS:
            raise RequestError(f"{len(described)} tools are given; the limit is {MAX_TOOLS}", parameter="tools")
        functions = tuple(function for function, _ in described)
        names = [function.name for function in functions]
        if len({*names}) < len(names):
            raise RequestError("two tools have the same name", parameter="tools")
        named = () if choice.named is None else (choice.named,)
        if unknown := {*named, *(choice.allowed or ())} - {*names}:
            name = min(unknown)[:64]
            raise RequestError(f"tool_choice names {name!r}, but no tool has that name", parameter="tool_choice")
        if choice.mode == "required" and not names:
            raise RequestError(_NEEDS_TOOLS, parameter="tool_choice")
        if choice.mode == "none" or not names:
            return cls()
        if format is None:
            message = "this model's chat template shows no known format of tool calls; see --tool-call-parser"
            raise RequestError(message, parameter="tools")
        if taken := format.reserved_names & {*names}:
            message = f"a tool cannot be named {min(taken)!r}: this model's calls ({format.name}) mean no tool by that"
            raise RequestError(f"{message}; give it another name", parameter="tools")
        given = tuple(
            {"type": "function", "function": {"name": each.name, "description": about, "parameters": each.parameters}}
            for each, about in described
        )
        allowed = tuple(each for each in functions if choice.allowed is None or each.name in choice.allowed)
        only_one = format.takes_one if parallel is None else not parallel
        is_limited = len(allowed) < len(functions)
        return cls(allowed, given, is_limited, choice.mode == "required", choice.named, only_one, format)

    def template_input(
        self, messages: Sequence[dict[str, Any]], tool_format: ToolFormat | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages and tools for the chat template."""
        if tool_format is None:
            return [*messages], None
        options = {"is_required": self.is_required, "only_one": self.only_one}
        shown = tool_format.messages_with_tools(messages, self.given, **options)
        return shown, None if tool_format.describes_tools else [*self.given] or None

    def parser(self) -> AnswerParser:
        """Return a parser."""
        if self.format is None:
            return PlainParser()
        return self.format.parser(self.functions, only_one=self.only_one)

    def structure(self, content: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the structured-output parameters of an answer, or None if the text is not constrained.

        content: The client's structure, which applies if the model answers without a call. If the request allows calls,
        raises `RequestError` for a structure other than JSON, and for a schema that the grammar cannot express.
        """
        if self.format is None:
            return content
        if content is not None and content.json is None and content.json_object is None:
            raise RequestError("tools go with JSON only, with no other structure", parameter="structured_outputs")
        starts_after = None if content is None else content.starts_after
        functions = self._in_grammar(self.format, content)
        if not functions:
            return None
        try:
            grammar = self._grammar(self.format, functions, content)
            return StructuredOutputsParams(grammar=grammar, starts_after=starts_after)
        except LookaheadError as error:
            written = json.dumps(error.pattern)
            field = next((each.field for each in functions if written in json.dumps(each.parameters)), "tools")
            schema = next((each.parameters for each in functions if written in json.dumps(each.parameters)), {})
            place = place_of_pattern(schema, error.pattern)
            raise RequestError(f"{field}: {place}: {error}", parameter=field) from None
        except (RequestError, ValueError, TypeError, RecursionError):
            message = (
                "the parameters of the tools, or the schema given with them, are not valid JSON schemas, too deep, or "
                f"longer than {MAX_GRAMMAR_CHARS} characters in all"
            )
            raise RequestError(message, parameter="tools") from None

    def _in_grammar(self, tool_format: ToolFormat, content: StructuredOutputsParams | None) -> Sequence[Function]:
        if self.is_required:
            return _bounded([each for each in self.functions if self.named in {None, each.name}])
        if content is not None:
            return _bounded(self.functions)
        if tool_format.needs_grammar:
            return _bounded([each if each.strict else _lenient(each) for each in self.functions])
        if self.is_limited or any(function.strict for function in self.functions):
            return _bounded([each if each.strict else replace(each, parameters=_ANY) for each in self.functions])
        return ()

    def _grammar(
        self, tool_format: ToolFormat, functions: Sequence[Function], content: StructuredOutputsParams | None
    ) -> str:
        if self.is_required:
            return tool_format.forced(functions, only_one=self.only_one or self.named is not None)
        if content is not None:
            schema = {**json.loads(str(content.json or '{"type": "object"}')), FIELD: "structured_outputs"}
            return tool_format.or_content(functions, json.dumps(schema), only_one=self.only_one)
        return tool_format.optional(functions, only_one=self.only_one)


NO_TOOLS = Toolbox()


def _lenient(function: Function) -> Function:
    return replace(function, parameters={**function.parameters, LENIENT: True})


def _bounded(functions: Sequence[Function]) -> Sequence[Function]:
    """Check the schemas' size, and add the request's field to each schema, for later errors."""
    marked = [replace(each, parameters={**each.parameters, FIELD: each.field}) for each in functions]
    num_chars = 0
    for each in marked:
        try:
            num_chars += len(lark_json(each.parameters))
        except RequestError as error:
            raise RequestError(str(error), parameter=each.field) from None
        except (ValueError, TypeError, RecursionError):
            message = f"{each.field} is no JSON schema, or is nested too deep"
            raise RequestError(message, parameter=each.field) from None
        if num_chars > MAX_GRAMMAR_CHARS:
            message = (
                f"the parameters of the tools have more than {MAX_GRAMMAR_CHARS} characters without descriptions, "
                "the limit of a grammar: give fewer tools, or allow fewer by tool_choice"
            )
            raise RequestError(message, parameter="tools")
    return marked


def read_function(fields: Any, place: str, parameters_name: str = "parameters") -> tuple[Function, str]:
    """Return a tool and its description. Raises `RequestError`."""
    if not isinstance(fields, dict):
        raise RequestError(f"{place} must be an object with a name", parameter=place)
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{place}.name must be 1 to 128 letters, digits and any of _ - . : /"
        raise RequestError(message, parameter=f"{place}.name")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{place}.description must be a string", parameter=f"{place}.description")
    parameters = fields.get(parameters_name)
    given = {} if parameters is None else parameters
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        parameter = f"{place}.{parameters_name}"
        raise RequestError(f"{parameter} must be a JSON schema of an object", parameter=parameter)
    schema = _NO_PARAMETERS if parameters is None else {"type": "object", **given}
    return Function(name, schema, fields.get("strict") is True, f"{place}.{parameters_name}"), description or ""


def check_tool_type(tool: Any, place: str, served: str, form: str) -> None:
    """Raise `RequestError` if the tool's type is not `served`. form: Example of a tool, for the error."""
    if not isinstance(tool, dict):
        raise RequestError(f"{place} must be {form}", parameter=place)
    kind = tool.get("type")
    if kind == served:
        return
    if not isinstance(kind, str):
        raise RequestError(f"{place}.type must be a string; {place} must be {form}", parameter=f"{place}.type")
    raise RequestError(
        f"{place}.type = {kind!r:.80} is not supported: this server runs no tools of its own. Leave it out, or "
        f"describe a tool that the client runs: {form}",
        parameter=f"{place}.type",
    )


def read_choice(wanted: Any, name_of: Callable[[dict[str, Any]], Any], *, has_tools: bool) -> Choice:
    """Read OpenAI's `tool_choice`. Raises `RequestError`."""
    if wanted is None or wanted == "none":
        return Choice(wanted or "auto")
    if not has_tools:
        raise RequestError(_NEEDS_TOOLS, parameter="tool_choice")
    match wanted:
        case "auto" | "required":
            return Choice(wanted)
        case {"type": "allowed_tools"}:
            return _read_allowed(wanted.get("allowed_tools", wanted), name_of)  # chat completions nest these fields
        case {"type": "function"} if isinstance(named := name_of(wanted), str):
            return Choice("required", named)
    message = (
        'tool_choice must be none, auto, required, {"type": "function", ...} with the name of a tool, or '
        '{"type": "allowed_tools", ...} with names of tools'
    )
    raise RequestError(message, parameter="tool_choice")


def _read_allowed(fields: Any, name_of: Callable[[dict[str, Any]], Any]) -> Choice:
    mode, tools = (fields.get("mode"), fields.get("tools")) if isinstance(fields, dict) else (None, None)
    if not isinstance(mode, str) or mode not in {"auto", "required"}:
        raise RequestError("tool_choice: the mode of allowed_tools must be auto or required", parameter="tool_choice")
    listed = tools if isinstance(tools, list) else []
    are_functions = all(isinstance(each, dict) and each.get("type") == "function" for each in listed)
    names = [name_of(each) for each in listed] if are_functions else []
    if not names or not all(isinstance(name, str) for name in names):
        message = 'tool_choice: the tools of allowed_tools must be a list of {"type": "function", ...} with names'
        raise RequestError(message, parameter="tool_choice")
    return Choice(mode, allowed=frozenset(names))


def read_chat_tools(
    tools: Any, tool_choice: Any, parallel_tool_calls: bool | None, tool_format: ToolFormat | None
) -> Toolbox:
    """Read `tools` and `tool_choice`. Raises `RequestError`."""
    described = []
    for index, tool in enumerate(tools or []):
        place = f"tools[{index}]"
        check_tool_type(tool, place, "function", '{"type": "function", "function": ...}')
        described.append(read_function(tool.get("function"), f"{place}.function"))
    choice = read_choice(tool_choice, _name_in_function, has_tools=tools is not None)
    return Toolbox.make(described, tool_format, choice, parallel=parallel_tool_calls)


def _name_in_function(wanted: dict[str, Any]) -> Any:
    function = wanted.get("function")
    return function.get("name") if isinstance(function, dict) else None
