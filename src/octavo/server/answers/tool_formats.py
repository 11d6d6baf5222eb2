"""How a family of models writes its calls of tools: the parser that reads them, and the grammar that makes it do so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.runtime.ids import new_id
from octavo.server.answers.tool_parsers import HermesParser, LlamaParser, MistralParser
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern, text_up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.server.answers.call_parser import ToolParser


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as a client describes it. parameters: a JSON schema. strict: its calls must keep to that."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolFormat:
    """One family's way. Grammars are in llguidance's dialect of Lark.

    takes_one: chat templates of the family refuse several calls at once: several are read only if that is asked for.
    markers: what its calls are told from other text by; none of it is left out of an answer's text, special or not.
    spell: how a grammar names a text that is one token (`<[123]>`); None for what is none.
    """

    name: ClassVar[str]
    parser: ClassVar[type[ToolParser]]
    markers: ClassVar[tuple[str, ...]]
    takes_one: ClassVar[bool] = False

    def __init__(self, spell: Callable[[str], str | None] = lambda _: None) -> None:
        self._spell = spell

    def new_call_id(self) -> str:
        """Name a call."""
        return f"call_{new_id()[:24]}"

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Return the grammar of an answer that is calls and nothing else."""
        raise NotImplementedError

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Return the grammar of any text with calls in it, if the model likes."""
        raise NotImplementedError

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """Return the grammar of an answer that is calls, or JSON of a schema."""
        forced = self.forced(functions, only_one=only_one).replace("start:", "calls:", 1)
        return f"start: calls | content\ncontent: {lark_json(schema)}\n{forced}"

    def _marker(self, text: str) -> str:
        return self._spell(text) or json.dumps(text)

    def _behind_text(self, opener: str) -> str:
        """Return the rules of text up to what opens a call."""
        return text_up_to(opener, self._spell(opener))


class HermesFormat(ToolFormat):
    """Qwen and Hermes."""

    name = "hermes"
    parser = HermesParser
    markers = (HermesParser.opener, HermesParser.closer)

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """One call behind the other, on lines of their own."""
        opener = self._marker(HermesParser.opener)
        more = "" if only_one else f' ("\\n" {opener} rest)*'
        return f"start: {opener} rest{more}\n{self._rest(functions)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Text before, between and behind them."""
        start = "start: TEXT | head rest" if only_one else "start: (head rest)* TEXT"
        return f"{start}\n{self._behind_text(HermesParser.opener)}\n{self._rest(functions)}"

    def _rest(self, functions: Sequence[Function]) -> str:
        return f'rest: "\\n" call "\\n" {self._marker(HermesParser.closer)}\n{_calls(functions, "arguments")}'


class LlamaFormat(ToolFormat):
    """Llama 3."""

    name = "llama3_json"
    parser = LlamaParser
    markers = (LlamaParser.opener,)
    takes_one = True

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Objects with semicolons between, behind the tag if it is a token."""
        return f"start: {self._all(only_one)}\n{_calls(functions, 'parameters')}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """What begins like an object is a call."""
        text = f"TEXT: /([^{{ \\t\\r\\n](.|\\n)*)?/ {FEW_BLANKS} & ~/{pattern(LlamaParser.opener)}(.|\\n)*/"
        return f"start: TEXT | {self._all(only_one)}\n{text}\n{_calls(functions, 'parameters')}"

    def _all(self, only_one: bool) -> str:
        tag = self._spell(LlamaParser.opener)
        calls = "call" if only_one else 'call ("; " call)*'
        return f"{tag}? {calls}" if tag else calls


class MistralFormat(ToolFormat):
    """Mistral's models before 2025: a list."""

    name = "mistral"
    parser = MistralParser
    markers = (MistralParser.opener, "[CALL_ID]", MistralParser.arguments_marker)

    def new_call_id(self) -> str:
        """Mistral's templates take ids of nine characters."""
        return new_id()[:9]

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """A list of objects."""
        return f"start: {self._marker(MistralParser.opener)} rest\n{self._rest(functions, only_one)}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Text, and behind it the list."""
        head = self._behind_text(MistralParser.opener)
        return f"start: TEXT | head rest\n{head}\n{self._rest(functions, only_one)}"

    def _rest(self, functions: Sequence[Function], only_one: bool) -> str:
        more = "" if only_one else ' (", " call)*'
        return f'rest: " "? "[" call{more} "]"\n{_calls(functions, "arguments")}'


class NamedMistralFormat(MistralFormat):
    """Mistral's models since 2025: a name and its arguments."""

    def _rest(self, functions: Sequence[Function], only_one: bool) -> str:
        opener, arguments = self._marker(MistralParser.opener), self._marker(MistralParser.arguments_marker)
        calls = [f'call{i}: "{f.name}" {arguments} {lark_json(f.parameters)}' for i, f in enumerate(functions)]
        more = "" if only_one else f" ({opener} call)*"
        return f"rest: call{more}\n{_choice(len(functions))}\n" + "\n".join(calls)


def _calls(functions: Sequence[Function], key: str) -> str:
    """Return the rules of one call that is an object, made of the same lexemes as any JSON: it may be one as well."""
    rules = [_choice(len(functions)), "COLON: /: ?/", "COMMA: /, ?/"]
    for index, function in enumerate(functions):
        name, value, arguments = (json.dumps(json.dumps(text)) for text in ("name", function.name, key))
        rules.append(
            f'call{index}: "{{" {name} COLON {value} COMMA {arguments} COLON {lark_json(function.parameters)} "}}"'
        )
    return "\n".join(rules)


def _choice(count: int) -> str:
    return "call: " + " | ".join(f"call{index}" for index in range(count))


TOOL_FORMATS: dict[str, type[ToolFormat]] = {each.name: each for each in (HermesFormat, LlamaFormat, MistralFormat)}


_MARKS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",  # Llama 3.2's writes no tag
}


def find_tool_format(wanted: str, templates: Iterable[str], spell: Callable[[str], str | None]) -> ToolFormat | None:
    """Return the format of that name; for "auto" the one that the chat templates write; None where there is none."""
    text = "\n".join(templates)
    if wanted == "none":
        return None
    if wanted == "auto":
        found = next((name for mark, name in _MARKS.items() if mark in text), None)
        if found is None or (found == "hermes" and "<function=" in text):  # Qwen3-Coder's calls are not JSON
            return None
        wanted = found
    is_named = wanted == "mistral" and MistralParser.arguments_marker in text
    return (NamedMistralFormat if is_named else TOOL_FORMATS[wanted])(spell)
