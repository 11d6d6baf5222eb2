"""How a family of models writes its calls of tools: what all families' ways have in common."""

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
    from octavo.server.answers.parts import Heads


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as a client describes it.

    parameters: a JSON schema. strict: the tool's calls must fit it. field: of the request, that has the schema.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False
    field: str = "tools"


class ToolFormat:
    """One family's way. Grammars are in llguidance's dialect of Lark.

    takes_one: chat templates of the family refuse several calls at once: several are read only if that is asked for.
    frames_content: content stands between marks, too: its parser reads answers without tools as well.
    reads_reasoning: it tells the reasoning apart, too.
    reserved_names: what stands for something else where the name of a tool does.
    needs_grammar: without a grammar its models write no calls.
    describes_tools: chat templates of its models know no tools: `messages_with_tools` puts tools, calls and results
    into text.
    markers: what its calls are told from other text by; none of it is left out of an answer's text, special or not.
    spell: how a grammar names a text that is one token (`<[123]>`); None for what is none.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    takes_one: ClassVar[bool] = False
    frames_content: ClassVar[bool] = False
    reads_reasoning: ClassVar[bool] = False
    needs_grammar: ClassVar[bool] = False
    describes_tools: ClassVar[bool] = False
    reserved_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, spell: Callable[[str], str | None] = lambda _: None) -> None:
        self._spell = spell

    def parser(self, functions: Sequence[Function], *, only_one: bool = False) -> ToolParser:
        """Return what reads calls of these functions in one answer."""
        raise NotImplementedError

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, Heads]:  # noqa: ARG002 - the seam's
        """Return what begins a call even where reasoning was not closed: marks, and what must stand behind each."""
        return {}

    def new_call_id(self) -> str:
        """Name a call."""
        return f"call_{new_id()[:24]}"

    def messages_with_tools(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],  # noqa: ARG002 - the seam's
        *,
        is_required: bool,  # noqa: ARG002 - the seam's
        only_one: bool,  # noqa: ARG002 - the seam's
    ) -> list[dict[str, Any]]:
        """Return the messages that the chat template is given."""
        return [*messages]

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Return how the family writes calls, each a name and its arguments."""
        raise NotImplementedError

    def shows(self, text: str, name: str) -> bool:  # noqa: ARG002 - a family may know its own writing otherwise
        """Whether a text of a chat template, which calls this function, is in another spelling of the family's."""
        return False

    def content(self, schema: str) -> str | None:  # noqa: ARG002 - the seam's
        """Return the grammar of an answer that is JSON of a schema; None where the JSON stands alone."""
        return None

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
        return (self._spell(text) if text in self.markers else None) or json.dumps(text, ensure_ascii=False)

    def _pieces(self, text: str) -> list[str]:
        """Return a text cut around the markers in it."""
        either = "|".join(re.escape(each) for each in sorted(self.markers, key=len, reverse=True))
        return [piece for piece in re.split(f"({either})", text) if piece]

    def _literal(self, text: str) -> str:
        """Return how a grammar writes a text in which markers may stand; "" for none."""
        return " ".join(map(self._marker, self._pieces(text)))

    def _behind_text(self, opener: str) -> str:
        """Return the rules of text up to what opens a call: a mark, words before one, or a mark and words."""
        first, *more = self._pieces(opener)
        tokens = [self._spell(each) if each in self.markers else None for each in (first, *more)]
        if tokens[0] is not None:
            return text_up_to(first, " ".join(map(self._marker, (first, *more))))
        if more and (token := tokens[1]) is not None:
            begun = f"head: BEGUN {token}\nBEGUN: /(.|\\n)*{pattern(first)}/ {FEW_BLANKS}\n"
            return begun + text_up_to(more[0], token, head="unused")
        return text_up_to(opener, None)


def choice_of(count: int) -> str:
    """Return the rule of a call that is one of so many."""
    return "call: " + " | ".join(f"call{index}" for index in range(count))


def ordered_rules(place: str, are_needed: Sequence[bool], separator: str) -> list[str]:
    """Return the rules of `argument<place>_0` and those behind it, in their order, as `first<place>_0`.

    first<i> are those from the i-th on where none was written yet, further<i> where one was. are_needed: of each.
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
    """Return the rules of one call that is an object, made of the same lexemes as any JSON: it may be one as well.

    before: the rule of what stands in it before its name.
    """
    rules = [choice_of(len(functions)), "COLON: /: ?/", "COMMA: /, ?/"]
    for index, function in enumerate(functions):
        name, value, arguments = (json.dumps(json.dumps(text)) for text in (name_key, function.name, arguments_key))
        written = lark_json(function.parameters)
        rules.append(f'call{index}: "{{" {before}{name} COLON {value} COMMA {arguments} COLON {written} "}}"')
    return "\n".join(rules)


def json_text(value: Any) -> str:
    """Return JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
