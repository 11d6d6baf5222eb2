"""MiniMax M3's calls, with values as nested tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo.server.answers.argument_values import (
    is_text,
    json_of,
    part_of,
    property_names,
    property_of,
    schema_comment,
    text_lexeme,
    types_of,
)
from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.call_sections import NAME, SectionFormat
from octavo.server.answers.tool_format import choice_of, json_text
from octavo.server.answers.value_ends import MarkEnd
from octavo.server.answers.value_parser import ValueParser
from octavo.structured_output.lark import FEW_BLANKS, pattern
from octavo.structured_output.merging import alternatives, is_open, is_small, merged, properties_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Call, Wait
    from octavo.server.answers.tool_format import Function

MARK = "]<]minimax[>["
_ITEM = "item"
_MAX_DEPTH = 64
_ANY_TAG = "/[A-Za-z0-9_.$-]{1,64}/"
_ANY_TEXT = "/[^\\]](.|\\n)*/"  # cannot begin with a tag
_SCALARS = frozenset({"integer", "number", "boolean", "null"})


class NestedParser(ValueParser):
    """Reads MiniMax M3's calls. If a value has no schema, the value's text decides the type."""

    _form: MiniMaxM3Format
    _root: dict[str, Any]  # schema of the call's arguments

    def _call_steps(self, call: Call) -> Wait[None]:
        name = (yield from self._head(self._form.named)).strip()
        if not NAME.fullmatch(name):
            raise MalformedError
        call.name = name
        self._root = self._parameters.get(name, {})
        yield from self._arguments(call, self._object(call, "invoke", self._root, 0))

    def _object(self, call: Call, tag: str, schema: dict[str, Any], depth: int) -> Wait[None]:
        self._say("{", call)
        separator = ""
        while key := (yield from self._next_tag(tag)):
            self._held_piece = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            if (yield from self._value_of(call, key, property_of(schema, key, self._root), depth)):
                separator = ", "
        self._report("arguments", "}", call)

    def _items(self, call: Call, tag: str, schema: dict[str, Any], depth: int) -> Wait[None]:
        self._say("[", call)
        items = schema.get("items")
        while key := (yield from self._next_tag(tag)):
            if (yield from self._value_of(call, key, items if isinstance(items, dict) else {}, depth)):
                self._held_piece = ", "
        self._report("arguments", "]", call)

    def _next_tag(self, around: str) -> Wait[str]:
        """Return the name of the next opening tag, or "" at the closing tag of `around`."""
        if (yield from self._takes_next(f"{MARK}</{around}>")):
            self._drop()
            return ""
        yield from self._expect(f"{MARK}<")
        key = yield from self._head(">")
        if not key or key.startswith("/"):
            raise MalformedError
        self._drop()
        return key

    def _value_of(self, call: Call, tag: str, schema: dict[str, Any], depth: int) -> Wait[bool]:
        end = MarkEnd(f"{MARK}<{tag}>", f"{MARK}</{tag}>")
        if is_text(schema, self._root):
            self._say('"', call)
            yield from self._text_value(call, end)
            return True
        kinds = types_of(schema, self._root)
        first = yield from self._opened_tag()
        if first is not None:
            if depth > _MAX_DEPTH:
                raise MalformedError
            is_list = "array" in kinds and (first == _ITEM or "object" not in kinds)
            known = part_of(schema, self._root, "array" if is_list else "object")
            yield from (self._items if is_list else self._object)(call, tag, known, depth + 1)
            return True
        text = yield from self._whole_value(end)
        empty = "[]" if "array" in kinds else "{}" if "object" in kinds else None
        is_empty = not text.strip() and "string" not in kinds
        written = empty if is_empty else self._read_value(text, schema, self._root)
        if written is not None:
            self._say(written, call)
        self._held_piece = ""
        return written is not None

    def _opened_tag(self) -> Wait[str | None]:
        yield from self._skip_space()
        place = self._position
        name = None
        if (yield from self._takes(f"{MARK}<")) and (yield from self._peek()) not in {"/", ""}:
            name = yield from self._head(">")
        self._position = place if name is not None else 0
        return name


class MiniMaxM3Format(SectionFormat):
    """An object has a tag for each key, and a list has an `item` tag for each element. Other values are plain text."""

    name = "minimax_m3"
    markers = (MARK, "<tool_call>", "</tool_call>")
    opener, opens, between = f"{MARK}<tool_call>", f"{MARK}<tool_call>\n", "\n"
    closes, call_opens = f"\n{MARK}</tool_call>", f'{MARK}<invoke name="'
    named, call_closes = '">', f"{MARK}</invoke>"
    parser_class = NestedParser

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """See `SectionFormat`."""
        return f"{self.call_opens}{name}{self.named}{_written(arguments)}{self.call_closes}"

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        mark = self._marker(MARK)
        rules = [
            choice_of(len(functions)),
            *self._text("_bare", _ANY_TEXT),
            f"any: value_bare | tags? {mark}",
            f'tags: ({mark} "<" {_ANY_TAG} ">" any "</" {_ANY_TAG} ">")+',
        ]
        for index, function in enumerate(functions):
            head = self._literal(f"{self.call_opens}{function.name}{self.named}")
            rules.append(schema_comment(function))
            rules.append(f'call{index}: {head} members{index} {mark} "</invoke>"')
            rules += self._members(f"{index}", function.parameters, function.parameters)
        return "\n".join(rules)

    def _members(self, place: str, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        options = alternatives(schema, root)
        if len(options) == 1:
            return self._members_of(place, options[0], root)
        places = [f"{place}_o{index}" for index in range(len(options))]
        rules = [
            rule for here, each in zip(places, options, strict=True) for rule in self._members_of(here, each, root)
        ]
        return [f"members{place}: {' | '.join(f'members{here}' for here in places)}", *rules]

    def _members_of(self, place: str, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        mark, named = self._marker(MARK), properties_of(schema)
        if not named:
            return [f"members{place}: {'tags?' if is_open(schema) else chr(34) * 2}"]
        uses, rules = list[str](), list[str]()
        for number, (key, part, is_needed) in enumerate(named):
            here = f"{place}_{number}"
            uses.append(f"member{here}{'' if is_needed else '?'}")
            rules += [
                f"member{here}: {mark} {json_text(f'<{key}>')} value{here} {json_text(f'</{key}>')}",
                *self._value(here, part, root),
            ]
        return [f"members{place}: {' '.join(uses)}", *rules]

    def _value(self, place: str, part: Any, root: dict[str, Any]) -> list[str]:
        mark, schema = self._marker(MARK), merged(part, root)
        kinds = types_of(schema, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return [f"value{place}: ({' | '.join(self._literal(_written(each)) for each in values)}) {mark}"]
        if kinds == {"object"} and property_names(schema, root) and is_small(schema, root):
            return [f"value{place}: members{place} {mark}", *self._members(place, schema, root)]
        if kinds == {"array"} and isinstance(schema.get("items"), dict) and is_small(schema, root):
            item = f'{mark} "<{_ITEM}>" value{place}_0 "</{_ITEM}>"'
            return [f"value{place}: ({item})* {mark}", *self._value(f"{place}_0", schema["items"], root)]
        if kinds == {"string"}:
            return self._text(place, text_lexeme(schema))
        if kinds <= _SCALARS:
            return [f"value{place}: json{place} {mark}", f"json{place}: {json_of(schema, root)}"]
        return [f"value{place}: {f'tags? {mark}' if kinds == {'object'} else 'any'}"]

    def _text(self, place: str, written: str) -> list[str]:
        mark = self._marker(MARK)
        if mark.startswith('"'):
            return [f"value{place}[lazy]: TEXT{place.upper()} {mark}", f"TEXT{place.upper()}: {written} {FEW_BLANKS}"]
        without = f"& ~/(.|\\n)*{pattern(MARK)}(.|\\n)*/"
        return [f"value{place}: TEXT{place.upper()} {mark}", f"TEXT{place.upper()}: {written} {FEW_BLANKS} {without}"]


def _written(value: Any) -> str:
    match value:
        case str():
            return value
        case dict():
            return "".join(f"{MARK}<{key}>{_written(each)}{MARK}</{key}>" for key, each in value.items())
        case list():
            return "".join(f"{MARK}<{_ITEM}>{_written(each)}{MARK}</{_ITEM}>" for each in value)
    return json_text(value)
