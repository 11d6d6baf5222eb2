"""Base class of call formats."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.runtime.ids import new_id
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern, text_up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.server.answers.call_parser import ToolParser
    from octavo.server.answers.parts import CallStarts


@dataclass(frozen=True, slots=True)
class Function:
    """A client's tool.

    parameters: JSON schema of the arguments.
    strict: True if calls must match the schema.
    field: Name of the request's field with the schema.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False
    field: str = "tools"


class ToolFormat:
    """A format of tool calls. Grammars are in llguidance's dialect of Lark.

    markers: Texts around calls. The detokenizer keeps markers even if they are special tokens.
    takes_one: True if chat templates refuse several calls in one message. Then an answer has several calls only if the
    client asks for parallel calls.
    frames_content: True if markers also enclose content. Then the parser also reads answers to requests without tools.
    describes_tools: True if `messages_with_tools` writes the tools as text. Then the chat template gets no tools.
    token_name: Returns a token's name in a grammar, such as `<[123]>`, or None if the text is not one token.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    parser_class: ClassVar[type[ToolParser]]
    takes_one: ClassVar[bool] = False
    frames_content: ClassVar[bool] = False
    reads_reasoning: ClassVar[bool] = False
    needs_grammar: ClassVar[bool] = False
    describes_tools: ClassVar[bool] = False
    reserved_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, token_name: Callable[[str], str | None] = lambda _: None) -> None:
        self._token_name = token_name

    def parser(self, functions: Sequence[Function], *, only_one: bool = False) -> ToolParser:
        """Return a parser. only_one: True to drop all calls after the first."""
        return self.parser_class(self, functions, only_one=only_one)

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, CallStarts]:  # noqa: ARG002
        """Map each marker that can begin a call within reasoning to the texts that can follow the marker.

        A marker begins a call only if one of these texts follows. Otherwise the marker is a part of the reasoning.
        """
        return {}

    def new_call_id(self) -> str:
        """Return a new id."""
        return f"call_{new_id()[:24]}"

    def messages_with_tools(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],  # noqa: ARG002
        *,
        is_required: bool,  # noqa: ARG002
        only_one: bool,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return [*messages]

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Write calls (names and arguments) as the models do."""
        raise NotImplementedError

    def shows(self, text: str, name: str) -> bool:  # noqa: ARG002
        """Return True if `text` contains a call of `name` in a spelling that only chat templates use."""
        return False

    def content(self, schema: str) -> str | None:  # noqa: ARG002
        """Return a grammar for JSON of this schema between markers, or None if no markers enclose content."""
        return None

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Return a grammar that allows only calls."""
        raise NotImplementedError

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """Return a grammar that allows text and calls."""
        raise NotImplementedError

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """Return a grammar that allows calls, or JSON of this schema."""
        forced = self.forced(functions, only_one=only_one).replace("start:", "calls:", 1)
        return f"start: calls | content\ncontent: {lark_json(schema)}\n{forced}"

    def _marker(self, text: str) -> str:
        return (self._token_name(text) if text in self.markers else None) or json.dumps(text, ensure_ascii=False)

    def _pieces(self, text: str) -> list[str]:
        either = "|".join(re.escape(each) for each in sorted(self.markers, key=len, reverse=True))
        return [piece for piece in re.split(f"({either})", text) if piece]

    def _literal(self, text: str) -> str:
        return " ".join(map(self._marker, self._pieces(text)))

    def _text_after(self, opener: str) -> str:
        first, *more = self._pieces(opener)
        tokens = [self._token_name(each) if each in self.markers else None for each in (first, *more)]
        if tokens[0] is not None:
            return text_up_to(first, " ".join(map(self._marker, (first, *more))))
        if more and (token := tokens[1]) is not None:
            begun = f"head: BEGUN {token}\nBEGUN: /(.|\\n)*{pattern(first)}/ {FEW_BLANKS}\n"
            return begun + text_up_to(more[0], token, head="unused")
        return text_up_to(opener, None)


def choice_of(count: int) -> str:
    """Return the rule `call`, a choice of `call0`, `call1` and so on."""
    return "call: " + " | ".join(f"call{index}" for index in range(count))


def ordered_rules(place: str, are_needed: Sequence[bool], separator: str) -> list[str]:
    """Return grammar rules for the arguments of a call, in the schema's order.

    - `first<place>_<i>`: Argument i and later arguments, if no argument precedes them. A call uses `first<place>_0`.
    - `further<place>_<i>`: The same arguments, if another argument precedes them.

    are_needed: True for each required argument.
    """
    rules = []
    for number, is_needed in enumerate(are_needed):
        here, is_last = f"{place}_{number}", number + 1 == len(are_needed)
        first, further = ('""', "") if is_last else (f"first{place}_{number + 1}", f"further{place}_{number + 1}")
        rules += [
            f"first{here}: argument{here} {further}{'' if is_needed else ' | ' + first}",
            f"further{here}: ({separator} argument{here}){'' if is_needed else '?'} {further}",
        ]
    return rules


def object_rules(functions: Sequence[Function], name_key: str, arguments_key: str, before: str = "") -> str:
    """Return rules for calls that are JSON objects."""
    rules = [choice_of(len(functions)), "COLON: /: ?/", "COMMA: /, ?/"]
    for index, function in enumerate(functions):
        name, value, arguments = (json.dumps(json.dumps(text)) for text in (name_key, function.name, arguments_key))
        written = lark_json(function.parameters)
        rules.append(f'call{index}: "{{" {before}{name} COLON {value} COMMA {arguments} COLON {written} "}}"')
    return "\n".join(rules)


def json_text(value: Any) -> str:
    """Return JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
