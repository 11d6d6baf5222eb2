"""Call formats that consist of tags and write strings without quotes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.server.answers.argument_values import is_text, json_of, schema_comment, text_lexeme, types_of
from octavo.server.answers.call_sections import NAME, SectionFormat
from octavo.server.answers.parts import CallStarts
from octavo.server.answers.tagged_parser import TaggedParser
from octavo.server.answers.tool_format import choice_of, json_text
from octavo.structured_output.lark import FEW_BLANKS, pattern
from octavo.structured_output.merging import alternatives, is_open, merged, properties_of

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from octavo.server.answers.tool_format import Function

_ANY_KEY = "/[A-Za-z0-9_.$-]{1,64}/"


class TaggedFormat(SectionFormat):
    """A call is `call_opens`, the name, `named`, the arguments, and `call_closes`.

    An argument is `argument_opens`, the name, `argument_named`, the value, `value_closes`, and `argument_closes`.

    is_padded: True if a newline directly before or after a value is not part of the value.
    raw_marks: Pair of markers that may enclose any value.
    head_pattern: Matches the text between `call_opens` and `named`.
    text_mark: Marker after the name of a string argument.
    json_mark: Marker after the name of any other argument.
    """

    named: ClassVar[str]
    call_closes: ClassVar[str] = ""
    argument_opens: ClassVar[str]
    argument_named: ClassVar[str]
    value_closes: ClassVar[str]
    argument_closes: ClassVar[str] = ""
    is_padded: ClassVar[bool] = False
    text_mark: ClassVar[str] = ""
    json_mark: ClassVar[str] = ""
    raw_marks: ClassVar[tuple[str, str] | None] = None
    head_pattern: ClassVar[re.Pattern[str]] = NAME
    parser_class = TaggedParser

    def argument_starts(self, keys: Sequence[str]) -> list[str]:
        """Return the texts with which these arguments begin."""
        ends, *_ = self.argument_named.split("\n")
        marks = [self.text_mark, self.json_mark] if self.text_mark else [""]
        return [f"{self.argument_opens}{key}{mark}{ends}" for key in keys for mark in marks]

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """See `SectionFormat`."""
        pad = "\n" if self.is_padded else ""
        written = [self.call_opens, name, self.named]
        for key, value in arguments.items():
            text, mark = (value, self.text_mark) if isinstance(value, str) else (json_text(value), self.json_mark)
            opens = f"{self.argument_opens}{key}{mark}{self.argument_named}"
            written.append(f"{opens}{pad}{text}{pad}{self.value_closes}{self.argument_closes}")
        return "".join([*written, self.call_closes])

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        rules = [choice_of(len(functions))]
        for index, function in enumerate(functions):
            head = self._literal(f"{self.call_opens}{function.name}{self.named}")
            uses, more = self._arguments(f"{index}", function.parameters)
            call = f"call{index}: {head} {uses} {self._literal(self.call_closes)}"
            rules += [schema_comment(function), call, *more]
        return "\n".join(rules)

    def _arguments(self, place: str, parameters: dict[str, Any]) -> tuple[str, list[str]]:
        options = alternatives(parameters, parameters)
        if len(options) == 1:
            return self._arguments_of(place, options[0], parameters)
        found = [self._arguments_of(f"{place}_o{index}", each, parameters) for index, each in enumerate(options)]
        return f"({' | '.join(uses or chr(34) * 2 for uses, _ in found)})", [rule for _, more in found for rule in more]

    def _arguments_of(self, place: str, schema: dict[str, Any], root: dict[str, Any]) -> tuple[str, list[str]]:
        uses, rules = list[str](), list[str]()
        for number, (key, part, is_needed) in enumerate(properties_of(schema)):
            name = f"argument{place}_{number}"
            uses.append(name if is_needed else f"{name}?")
            rules += self._argument(name, json.dumps(key), merged(part, root), root)
        if not uses and is_open(schema):
            uses.append(f"any{place}*")
            rules += self._argument(f"any{place}", None, {}, root)
        return " ".join(uses), rules

    def _argument(self, name: str, key: str | None, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        marks = [(self.text_mark, "text"), (self.json_mark, "json")] if self.text_mark else [("", "")]
        if self.text_mark and key is not None:
            marks = marks[:1] if is_text(schema, root) else marks[1:]
        rules = [f"{name}: " + " | ".join(f"{name}{kind}" for _, kind in marks)] if marks[0][1] else []
        for mark, kind in marks:
            opens, named = self._literal(self.argument_opens), self._literal(mark + self.argument_named)
            value, more = self._value(f"{name}{kind}", schema, root, is_json=kind == "json")
            written = _ANY_KEY if key is None else key
            rules += [f"{name}{kind}: {opens} {written} {named} {value} {self._literal(self.argument_closes)}", *more]
        return rules

    def _value(
        self, name: str, schema: dict[str, Any], root: dict[str, Any], *, is_json: bool
    ) -> tuple[str, list[str]]:
        pad = '"\\n" ' if self.is_padded else ""
        closes = f"{pad}{self._literal(self.value_closes)}"
        if not is_json and (options := _texts(schema)):
            return f"{pad}({' | '.join(map(json_text, options))}) {closes}", []
        if is_json or "string" not in types_of(schema, root):
            return f"{pad}{json_of(schema, root)} {closes}", []
        end = ("\n" if self.is_padded else "") + self.value_closes
        upper = name.upper()
        first, *_ = self._pieces(self.value_closes)
        if first in self.markers and self._token_name(first):
            text_pattern = pattern(first)
            text = text_lexeme(schema, "\\n" if self.is_padded else "")
            rules = [f"{upper}: {text} {FEW_BLANKS} & ~/(.|\\n)*{text_pattern}(.|\\n)*/"]
            return f"{pad}{upper} {self._literal(self.value_closes)}", rules
        mark = json.dumps(end, ensure_ascii=False)
        return f"{pad}value_{name}", [
            f"value_{name}[lazy]: {upper} {mark}",
            f"{upper}: {text_lexeme(schema)} {FEW_BLANKS}",
        ]


def _texts(schema: dict[str, Any]) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values and all(isinstance(each, str) for each in values) else []


class Qwen3CoderFormat(TaggedFormat):
    """Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5."""

    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    opener, opens, between, closes, one_each = "<tool_call>", "<tool_call>\n", "\n", "</tool_call>", True
    call_opens, named, call_closes, strays = "<function=", ">\n", "</function>\n", ("<function=",)
    argument_opens, argument_named, value_closes, argument_closes = "<parameter=", ">", "</parameter>", "\n"
    is_padded = True


class SeedOSSFormat(TaggedFormat):
    """ByteDance's Seed-OSS."""

    name = "seed_oss"
    markers = ("<seed:tool_call>", "</seed:tool_call>", *Qwen3CoderFormat.markers[2:])
    opener, opens, between, closes, one_each = "<seed:tool_call>", "<seed:tool_call>\n", "\n", "</seed:tool_call>", True
    call_opens, named, call_closes, strays = "<function=", ">\n", "</function>\n", ("<function=",)
    argument_opens, argument_named, value_closes, argument_closes = "<parameter=", ">", "</parameter>", "\n"


class MiniMaxM2Format(TaggedFormat):
    """MiniMax M2."""

    name = "minimax_m2"
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    opener, opens, between, closes = "<minimax:tool_call>", "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"
    call_opens, named, call_closes = '<invoke name="', '">\n', "</invoke>"
    argument_opens, argument_named, value_closes, argument_closes = '<parameter name="', '">', "</parameter>", "\n"


def _named_after(form: TaggedFormat, functions: Sequence[Function]) -> dict[str, CallStarts]:
    ends = (form.argument_opens, form.closes)
    return {form.opener: CallStarts(f"{each.name}{end}" for each in functions for end in ends)}


class GLMFormat(TaggedFormat):
    """GLM 4.5 and 4.6, Ling 3, Laguna."""

    name = "glm45"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    opener, opens, between, closes, one_each = "<tool_call>", "<tool_call>", "\n", "</tool_call>", True
    named = "\n"
    argument_opens, argument_named = "<arg_key>", "</arg_key>\n<arg_value>"
    value_closes, argument_closes = "</arg_value>", "\n"

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, CallStarts]:
        """See `ToolFormat`."""
        return _named_after(self, functions)


class GLM47Format(TaggedFormat):
    """GLM 4.7. Calls contain no line feeds."""

    name = "glm47"
    markers = GLMFormat.markers
    opener, opens, closes, one_each = "<tool_call>", "<tool_call>", "</tool_call>", True
    named, argument_opens, argument_named, value_closes = "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, CallStarts]:
        """See `ToolFormat`."""
        return _named_after(self, functions)


class DeepSeekV32Format(TaggedFormat):
    """DeepSeek V3.2. An argument's tag shows whether the value is a string."""

    name = "deepseek_v32"
    markers = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    opener, opens, between = "<｜DSML｜function_calls>", "<｜DSML｜function_calls>\n", "\n"
    closes = "\n</｜DSML｜function_calls>"
    call_opens, named, call_closes = '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>"
    argument_opens, argument_named = '<｜DSML｜parameter name="', ">"
    value_closes, argument_closes = "</｜DSML｜parameter>", "\n"
    text_mark, json_mark = '" string="true"', '" string="false"'


class DeepSeekV4Format(DeepSeekV32Format):
    """DeepSeek V4. Only the enclosing tag differs from V3.2."""

    name = "deepseek_v4"
    markers = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    opener, opens, closes = "<｜DSML｜tool_calls>", "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"


class MiniCPM5Format(TaggedFormat):
    """MiniCPM 5."""

    name = "minicpm5"
    markers = ("<function", "</function>")
    opener, opens, between, one_each = "<function", '<function name="', "\n", True
    named, call_closes = '">', "</function>"
    argument_opens, argument_named, value_closes = '<param name="', '">', "</param>"
    raw_marks = ("<![CDATA[", "]]>")


class Hy3Format(TaggedFormat):
    """Tencent's Hy3."""

    name = "hy_v3"
    markers = (
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        "<tool_call:opensource>",
        "</tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    )
    opener, opens = "<tool_calls:opensource>", "<tool_calls:opensource>\n"
    between, closes = "\n", "\n</tool_calls:opensource>"
    call_opens, named, call_closes = "<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>"
    argument_opens, argument_named = "<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>"
    value_closes, argument_closes = "</arg_value:opensource>", "\n"
