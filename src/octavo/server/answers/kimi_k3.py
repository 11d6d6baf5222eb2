"""Kimi K3's calls. Three special tokens delimit the tags."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from octavo.server.answers.argument_values import types_of
from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.parts import CallStarts
from octavo.server.answers.tagged_calls import TaggedFormat
from octavo.server.answers.tagged_parser import TaggedParser
from octavo.server.answers.tool_format import choice_of, json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_ATTRIBUTES = re.compile(rf"\s*(?:{_ATTRIBUTE.pattern}\s*)*")
_INDEX_RULE = "/[0-9]{1,3}/"
_ANY_KEY = "/[A-Za-z0-9_.$-]{1,64}/"
_JSON_TYPES = ("number", "boolean", "null", "object", "array")


class KimiK3Parser(TaggedParser):
    """Reads Kimi K3's tags. Attributes have any order. Unknown attributes are ignored."""

    def _name(self) -> Wait[str]:
        attributes = yield from self._attributes()
        self._position -= len(_SEP)
        return attributes.get("tool", "")

    def _key(self, parameters: dict[str, Any]) -> Wait[tuple[str, bool | None]]:  # noqa: ARG002
        attributes = yield from self._attributes()
        if "key" not in attributes:
            raise MalformedError
        kind = attributes.get("type")
        return attributes["key"], None if kind is None else kind == "string"

    def _attributes(self) -> Wait[dict[str, str]]:
        head = yield from self._head(_SEP)
        if not _ATTRIBUTES.fullmatch(head):
            raise MalformedError
        found = _ATTRIBUTE.findall(head)
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


class KimiK3Format(TaggedFormat):
    """Calls are numbered from 1. An argument's tag contains the value's type."""

    name = "kimi_k3"
    markers = (_OPEN, _CLOSE, _SEP)
    opener = opens = f"{_OPEN}tools{_SEP}"
    closes = f"{_CLOSE}tools{_SEP}"
    call_opens, named, call_closes = f"{_OPEN}call", _SEP, f"{_CLOSE}call{_SEP}"
    argument_opens, argument_named, value_closes = f"{_OPEN}argument", _SEP, f"{_CLOSE}argument{_SEP}"
    head_pattern = re.compile(r"[^<]*")
    frames = (f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}", f"{_CLOSE}message{_SEP}")
    parser_class = KimiK3Parser

    def argument_starts(self, keys: Sequence[str]) -> list[str]:
        """See `TaggedFormat`. In an argument's tag, the type may precede the name."""
        before = ["", *(f' type="{each}"' for each in ("string", *_JSON_TYPES))]
        return [f'{self.argument_opens}{each} key="{_escaped(key)}"' for key in keys for each in before]

    def reasoning_ends(self, functions: Sequence[Function]) -> dict[str, CallStarts]:  # noqa: ARG002
        """See `ToolFormat`. The texts contain no function name."""
        return {self.opener: CallStarts([self.call_opens])}

    def write_call(self, index: int, name: str, arguments: dict[str, Any]) -> str:
        """See `SectionFormat`."""
        written = [f'{self.call_opens} tool="{name}" index="{index + 1}"{_SEP}']
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json_text(value)
            head = f'{self.argument_opens} key="{_escaped(key)}" type="{_type_of(value)}"{_SEP}'
            written.append(f"{head}{text}{self.value_closes}")
        return "".join([*written, self.call_closes])

    def call_rules(self, functions: Sequence[Function]) -> str:
        """See `SectionFormat`."""
        sep, rules = self._marker(_SEP), [choice_of(len(functions))]
        for index, function in enumerate(functions):
            head = self._literal(f'{self.call_opens} tool="{function.name}" index="')
            uses, more = self._arguments(f"{index}", function.parameters)
            number = f'{_INDEX_RULE} "\\"" {sep}'
            rules += [f"call{index}: {head} {number} {uses} {self._literal(self.call_closes)}", *more]
        return "\n".join(rules)

    def _argument(self, name: str, key: str | None, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
        kinds = types_of(schema, root)
        texts, others = "string" in kinds, kinds - {"string"}
        written = _ANY_KEY if key is None else json_text(_escaped(json.loads(key)))
        rules = list[str]()
        uses = list[str]()
        for kind, types in (("text", ("string",) * texts), ("json", _types_of(others))):
            if not types:
                continue
            uses.append(f"{name}{kind}")
            value, more = self._value(f"{name}{kind}", schema, root, is_json=kind == "json")
            type_rule = " | ".join(json_text(each) for each in types)
            opens = self._literal(f'{self.argument_opens} key="')
            head = f'{opens} {written} "\\" type=\\"" ({type_rule}) "\\""'
            rules += [f"{name}{kind}: {head} {self._marker(_SEP)} {value}", *more]
        return [f"{name}: {' | '.join(uses)}", *rules]


def _escaped(key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;")


def _type_of(value: Any) -> str:
    types = {bool: "boolean", type(None): "null", str: "string", dict: "object", list: "array"}
    return types.get(type(value), "number")


def _types_of(kinds: frozenset[str]) -> tuple[str, ...]:
    return tuple(each for each in _JSON_TYPES if each in kinds or (each == "number" and "integer" in kinds))
