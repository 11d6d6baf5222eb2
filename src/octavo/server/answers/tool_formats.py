"""Call formats of Hermes, Llama and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.runtime.ids import new_id
from octavo.server.answers.call_parser import BLANKS_WITHIN
from octavo.server.answers.tool_format import ToolFormat, choice_of, json_text, object_rules
from octavo.server.answers.tool_parsers import HermesParser, LlamaParser, MistralParser
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.tool_format import Function


class HermesFormat(ToolFormat):
    """Qwen and Hermes. A call is an object in tags."""

    name = "hermes"
    markers = (HermesParser.opener, HermesParser.closer)
    parser_class = HermesParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        written = [json_text({"name": name, "arguments": arguments}) for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        opener = self._marker(HermesParser.opener)
        more = "" if only_one else f' ("\\n" {opener} rest)*'
        return f"start: {opener} rest{more}\n{self._rest(functions)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        start = "start: TEXT | head rest" if only_one else "start: (head rest)* TEXT"
        return f"{start}\n{self._text_after(HermesParser.opener)}\n{self._rest(functions)}"

    def _rest(self, functions: Sequence[Function]) -> str:
        closer = self._marker(HermesParser.closer)
        return f'rest: "\\n" call "\\n" {closer}\n{object_rules(functions, "name", "arguments")}'


class LlamaFormat(ToolFormat):
    """Llama 3. A call is an object."""

    name = "llama3_json"
    markers = (LlamaParser.opener,)
    takes_one = True
    parser_class = LlamaParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        return "; ".join(json_text({"name": name, "parameters": arguments}) for name, arguments in calls)

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return f"start: {self._all(only_one)}\n{object_rules(functions, 'name', 'parameters')}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        text = f"/([^{{ \\t\\r\\n](.|\\n)*)?/ {FEW_BLANKS} & ~/{pattern(LlamaParser.opener)}(.|\\n)*/"
        rules = [f"TEXT: {text}", f"BEFORE: {text}", object_rules(functions, "name", "parameters")]
        for index, function in enumerate(functions):
            kind = f'("type"{BLANKS_WITHIN}:{BLANKS_WITHIN}"function"{BLANKS_WITHIN},{BLANKS_WITHIN})?'
            head = f'\\{{{BLANKS_WITHIN}{kind}"name"{BLANKS_WITHIN}:{BLANKS_WITHIN}"{pattern(function.name)}"'
            keys = f'{BLANKS_WITHIN},{BLANKS_WITHIN}"({"|".join(LlamaParser.arguments_keys)})"{BLANKS_WITHIN}:'
            later = f'later{index}: head{index} " "? {lark_json(function.parameters)} "}}"'
            rules += [f"head{index}[lazy]: BEFORE /{head}{keys}/", later]
        later = " | ".join(f"later{index}" for index in range(len(functions)))
        more = "" if only_one else ' ("; " call)*'
        return "\n".join([f"start: TEXT | {self._all(only_one)} | later{more}", f"later: {later}", *rules])

    def _all(self, only_one: bool) -> str:
        tag = self._token_name(LlamaParser.opener)
        calls = "call" if only_one else 'call ("; " call)*'
        return f"{tag}? {calls}" if tag else calls


class MistralFormat(ToolFormat):
    """Mistral's models before 2025. Calls are a list of objects."""

    name = "mistral"
    markers = (MistralParser.opener, "[CALL_ID]", MistralParser.arguments_marker)
    parser_class = MistralParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        written = [json_text({"name": name, "arguments": arguments}) for name, arguments in calls]
        return f"[TOOL_CALLS][{', '.join(written)}]"

    def new_call_id(self) -> str:
        """Return a new id of nine characters, as Mistral's templates require."""
        return new_id()[:9]

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return f"start: {self._marker(MistralParser.opener)} rest\n{self._rest(functions, only_one)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        head = self._text_after(MistralParser.opener)
        return f"start: TEXT | head rest\n{head}\n{self._rest(functions, only_one)}"

    def _rest(self, functions: Sequence[Function], only_one: bool) -> str:
        more = "" if only_one else ' (", " call)*'
        return f'rest: " "? "[" call{more} "]"\n{object_rules(functions, "name", "arguments")}'


class NamedMistralFormat(MistralFormat):
    """Mistral's models since 2025. A call is `[TOOL_CALLS]`, a name, `[ARGS]` and the arguments."""

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json_text(arguments)}" for name, arguments in calls)

    def _rest(self, functions: Sequence[Function], only_one: bool) -> str:
        opener, arguments = self._marker(MistralParser.opener), self._marker(MistralParser.arguments_marker)
        calls = [f'call{i}: "{f.name}" {arguments} {lark_json(f.parameters)}' for i, f in enumerate(functions)]
        more = "" if only_one else f" ({opener} call)*"
        return f"rest: call{more}\n{choice_of(len(functions))}\n" + "\n".join(calls)
