"""Gemma 4's calls. Keys have no quotes, and special tokens enclose strings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo.engine.python_literals import NotALiteralError, literal_json
from octavo.server.answers.argument_values import json_of, types_of
from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.call_sections import NAME, SectionFormat
from octavo.server.answers.tool_format import choice_of, json_text, ordered_rules
from octavo.server.answers.value_ends import MarkEnd
from octavo.server.answers.value_parser import ValueParser
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern
from octavo.structured_output.merging import alternatives, is_open, is_small, merged, properties_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.tool_format import Function
    from octavo.server.answers.value_ends import ValueEnd

QUOTE = '<|"|>'
_KEY = re.compile(r"""[^\s:,{}\[\]<"']*""")
_WORD = re.compile(r"[\w.+-]+")
_MAX_DEPTH = 64
_ANY_KEY = "/[A-Za-z0-9_.$-]{1,64}/"
_EMPTY = '"{" "}"'
_SCALARS = frozenset({"integer", "number", "boolean", "null"})


class GemmaParser(ValueParser):
    """Reads Gemma 4's calls. JSON's quotes may also enclose strings."""

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._skip_space()
        name = yield from self._run(NAME)
        yield from self._expect("{")
        call.name = name
        yield from self._arguments(call, self._object(call, 0))

    def _object(self, call: Call, depth: int) -> Wait[None]:
        self._say("{", call)
        given = set[str]()
        while (yield from self._skip_space()) != "}":
            key = yield from self._key()
            if key in given:
                raise MalformedError
            self._held_piece = f"{', ' if given else ''}{key}: "
            given.add(key)
            yield from self._any_value(call, depth)
            if not (yield from self._takes_next(",")):
                break
        yield from self._expect("}")
        self._report("arguments", "}", call)

    def _key(self) -> Wait[str]:
        if (char := (yield from self._peek())) == "<":
            end = yield from self._opening_quote()
            key = yield from self._whole_value(end)
        elif char == '"':
            key = yield from self._string()
        elif not (key := (yield from self._run(_KEY))):
            raise MalformedError
        yield from self._expect(":")
        return json_text(key)

    def _any_value(self, call: Call, depth: int) -> Wait[None]:
        if depth > _MAX_DEPTH:
            raise MalformedError
        char = yield from self._skip_space()
        if char == "<":
            end = yield from self._opening_quote()
            self._say('"', call)
            yield from self._text_value(call, end)
        elif char == '"':
            self._say(json_text((yield from self._string())), call)
            self._drop()
        elif char == "{":
            self._position += 1
            yield from self._object(call, depth + 1)
        elif char == "[":
            self._position += 1
            yield from self._items(call, depth + 1)
        else:
            word = yield from self._run(_WORD)
            if self._is_cut:
                raise MalformedError  # the word may be incomplete
            self._say(_word(word), call)
            self._drop()

    def _items(self, call: Call, depth: int) -> Wait[None]:
        self._say("[", call)
        while (yield from self._skip_space()) != "]":
            yield from self._any_value(call, depth)
            self._held_piece = ", "
            if not (yield from self._takes_next(",")):
                break
        yield from self._expect("]")
        self._report("arguments", "]", call)

    def _opening_quote(self) -> Wait[ValueEnd]:
        if not (yield from self._takes_all(QUOTE)):
            raise MalformedError
        self._drop()
        return MarkEnd(QUOTE, QUOTE)


class GemmaFormat(SectionFormat):
    """A call is `call:name{key:value,...}` between two markers."""

    name = "gemma4"
    markers = ("<|tool_call>", "<tool_call|>", QUOTE)
    opener, opens, closes, one_each = "<|tool_call>", "<|tool_call>call:", "<tool_call|>", True
    parser_class = GemmaParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """See `SectionFormat`."""
        return name + _written(arguments)

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`.

        An open schema without properties allows any object. Several types allow any value, unless all are scalar.
        """
        quote = self._marker(QUOTE)
        is_token = not quote.startswith('"')
        text = f"TEXTS: /(.|\\n)*/ {FEW_BLANKS}" + (f" & ~/(.|\\n)*{pattern(QUOTE)}(.|\\n)*/" if is_token else "")
        quoted_rule = (
            f"quoted: {quote} TEXTS {quote}" if is_token else f"quoted: {quote} ended\nended[lazy]: TEXTS {quote}"
        )
        rules = [
            choice_of(len(functions)),
            text,
            quoted_rule,
            'any: quoted | anyobject | "[" (any ("," any)*)? "]" | scalar',
            f'anyobject: "{{" ({_ANY_KEY} ":" any ("," {_ANY_KEY} ":" any)*)? "}}"',
            f"scalar: {lark_json({'type': sorted(_SCALARS)})}",
        ]
        for index, function in enumerate(functions):
            rules.append(f'call{index}: "{function.name}" value{index}')
            rules += self._object(f"{index}", function.parameters, function.parameters)
        return "\n".join(rules)

    def _value(self, place: str, part: Any, root: dict[str, Any]) -> list[str]:
        schema = merged(part, root)
        kinds = types_of(schema, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return [f"value{place}: {' | '.join(self._literal(_written(each)) for each in values)}"]
        if kinds == {"object"} and is_small(schema, root):
            return self._object(place, schema, root)
        if kinds == {"array"} and isinstance(schema.get("items"), dict) and is_small(schema, root):
            item = f"value{place}_0"
            return [f'value{place}: "[" ({item} ("," {item})*)? "]"', *self._value(f"{place}_0", schema["items"], root)]
        if kinds <= _SCALARS:
            return [f"value{place}: {json_of(schema, root)}"]
        known = {frozenset({"string"}): "quoted", frozenset({"object"}): "anyobject"}
        return [f"value{place}: {known.get(kinds, 'any')}"]

    def _object(self, place: str, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        options = alternatives(schema, root)
        if len(options) == 1:
            return self._object_of(place, options[0], root)
        places = [f"{place}_o{index}" for index in range(len(options))]
        rules = [rule for here, each in zip(places, options, strict=True) for rule in self._object_of(here, each, root)]
        return [f"value{place}: {' | '.join(f'value{here}' for here in places)}", *rules]

    def _object_of(self, place: str, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        named = properties_of(schema)
        if not named:
            return [f"value{place}: {'anyobject' if is_open(schema) else _EMPTY}"]
        are_needed = [is_needed for *_, is_needed in named]
        rules = [f'value{place}: "{{" first{place}_0 "}}"', *ordered_rules(place, are_needed, '","')]
        for number, (key, part, _) in enumerate(named):
            here = f"{place}_{number}"
            rules += [f'argument{here}: {json_text(key)} ":" value{here}', *self._value(here, part, root)]
        return rules


def _written(value: Any) -> str:
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case dict():
            return "{" + ",".join(f"{key}:{_written(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
    return json_text(value)


def _word(word: str) -> str:
    try:
        return literal_json(word)
    except NotALiteralError:
        raise MalformedError from None
