"""Call formats in Python's syntax: [name(key=value, ...), ...]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from octavo.server.answers.argument_values import json_of, types_of
from octavo.server.answers.call_parser import BLANKS_WITHIN
from octavo.server.answers.call_sections import SectionFormat
from octavo.server.answers.code_spans import CODE, OUTSIDE
from octavo.server.answers.python_parser import PythonListParser, PythonParser
from octavo.server.answers.tool_format import choice_of, json_text, ordered_rules
from octavo.structured_output.lark import FEW_BLANKS, pattern
from octavo.structured_output.merging import alternatives, is_open, merged, properties_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.tool_format import Function

_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_BLANKS = r"[ \t\r\n]*"
_KEY = r"""[^\s=,()\[\]{}"']+"""
_BEFORE_LIST = rf"{OUTSIDE}({CODE}|[^`A-Za-z0-9_\])])"  # a bracket after this text is neither a subscript nor code
_NOTHING = '""'
_WORDS: dict[Any, str] = {True: "True", False: "False", None: "None"}
_WORDS_OF = {"boolean": ("True", "False"), "null": ("None",)}


class PythonFormat(SectionFormat):
    """Base of formats in Python's syntax. Values are JSON, or Python's True, False and None."""

    between: ClassVar[str] = ", "
    parser_class = PythonParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """See `SectionFormat`."""
        written = [f"{key}={_value(value)}" for key, value in arguments.items()]
        return f"{name}({', '.join(written)})"

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        rules = [choice_of(len(functions)), "COMMA: /, ?/"]
        for index, function in enumerate(functions):
            found = [_argument_rules(place, each, function.parameters) for place, each in _options_of(index, function)]
            inside = " | ".join(first or _NOTHING for first, _ in found)
            rules += [f'call{index}: "{function.name}(" inside{index} ")"', f"inside{index}: {inside}"]
            rules += [rule for _, more in found for rule in more]
        return "\n".join(rules)


def _value(value: Any) -> str:
    return _WORDS[value] if value is None or isinstance(value, bool) else json_text(value)


def _options_of(index: int, function: Function) -> list[tuple[str, dict[str, Any]]]:
    options = alternatives(function.parameters, function.parameters)
    return [(f"{index}" if len(options) == 1 else f"{index}_o{number}", each) for number, each in enumerate(options)]


def _argument_rules(place: str, schema: dict[str, Any], root: dict[str, Any]) -> tuple[str, list[str]]:
    named = properties_of(schema)
    if not named:
        if not is_open(schema):
            return "", []
        value = _value_rules(f"value{place}", {}, root)
        return f"(any{place} (COMMA any{place})*)?", [f'any{place}: {_ANY_KEY} "=" value{place}', *value]
    rules = ordered_rules(place, [is_needed for *_, is_needed in named], "COMMA")
    for number, (key, part, _) in enumerate(named):
        here = f"{place}_{number}"
        value = _value_rules(f"value{here}", merged(part, root), root)
        rules += [f'argument{here}: {json_text(key)} "=" value{here}', *value]
    return f"first{place}_0", rules


def _value_rules(name: str, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    kinds = frozenset[str]() if {"const", "enum"} & schema.keys() else types_of(schema, root)
    words = [f'"{word}"' for kind, words in _WORDS_OF.items() if kind in kinds for word in words]
    if kinds == {"boolean"}:
        return [f"{name}: {' | '.join(words)}"]
    return [
        f"{name}: {' | '.join([*words, 'json_' + name])}",
        f"json_{name}: {json_of(schema, root)}",
    ]


class PythonicFormat(PythonFormat):
    """Llama 4 and 3.2, Gemma 3, ToolACE. The list of calls may follow other text."""

    name = "pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    opener, opens, closes = "[", "[", "]"
    parser_class = PythonListParser

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat` and `PythonListParser`."""
        call_starts = [f"\\[{BLANKS_WITHIN}{pattern(each.name)}{BLANKS_WITHIN}\\(" for each in functions]
        is_call = f"{_BEFORE_LIST}({'|'.join(call_starts)}){_BLANKS}({_KEY}{_BLANKS}=|\\){_BLANKS}[,\\]])"
        ends = f"{FEW_BLANKS} & ~/{pattern(self.markers[0])}(.|\\n)*/ & ~/{is_call}(.|\\n)*/"
        rules = [
            f"TEXT: /([^\\[ \\t\\r\\n](.|\\n)*)?/ {ends}",
            f"BEFORE: /[^\\[ \\t\\r\\n](.|\\n)*/ {ends} & /{_BEFORE_LIST}/",
            self._section(functions, only_one=only_one),
        ]
        comma = self._literal(self.between)
        more, others = ("", "") if only_one else (f" ({comma} call)*", f'call ({comma} call)* "]"')
        uses = []
        for index, function in enumerate(functions):
            rules.append(f"HEAD{index}: /{call_starts[index]}{_BLANKS}/")
            options = _options_of(index, function)
            first = [each for place, schema in options for each in _beginnings(place, schema)]
            endings = [(f"{key}{_BLANKS}=", f'{rest} ")"{more} "]"') for key, rest in first]
            if not all(schema.get("required") for _, schema in options):
                endings += [(f"\\){_BLANKS}\\]", ""), *([(f"\\){_BLANKS}, ", others)] if others else [])]
            for number, (ending, rest) in enumerate(endings):
                name = f"{index}_{number}"
                rules.append(f"head{name}[lazy]: BEFORE HEAD{index} /{ending}/")
                uses.append(f"head{name} {rest}")
        return "\n".join(['start: TEXT | "[" section | later', f"later: {' | '.join(uses)}", *rules])


def _beginnings(place: str, schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (pattern of the name, rules after the name) for each argument that may come first."""
    named = properties_of(schema)
    if not named:
        return [(_ANY_KEY.strip("/"), f"value{place} (COMMA any{place})*")] if is_open(schema) else []
    found = []
    for number, (key, _, is_needed) in enumerate(named):
        further = f"further{place}_{number + 1}" if number + 1 < len(named) else ""
        found.append((pattern(key), f"value{place}_{number} {further}"))
        if is_needed:
            break
    return found


class LFM2Format(PythonFormat):
    """LFM2."""

    name = "lfm2"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    opener, opens, closes = "<|tool_call_start|>", "<|tool_call_start|>[", "]<|tool_call_end|>"


class OLMo3Format(PythonFormat):
    """OLMo 3."""

    name = "olmo3"
    markers = ("<function_calls>", "</function_calls>")
    opener, opens, between, closes = "<function_calls>", "<function_calls>", "\n", "</function_calls>"
