"""MiniMax M3's calls: the schema decides whether tags within tags are an object or a list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_grammars import Grammars

from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.nested_calls import MARK, MiniMaxM3Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tool_format import Function

PLACE = {"type": "object", "properties": {"zip": {"type": "string"}, "rooms": {"type": "array", "items": {}}}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "$defs": {"place": PLACE},
    "properties": {
        "text": {"type": "string", "minLength": 1},
        "number": {"type": "integer"},
        "place": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "places": {"type": "array", "items": PLACE},
        "list": {"type": "array", "items": {"type": "integer"}},
        "free": {},
        "either": {"type": ["string", "integer"]},
        "code": {"enum": ["1", "2"]},
        "item": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
    "additionalProperties": False,
}
FUNCTION = Function("save", PARAMETERS)


def read(text: str, *, is_cut: bool = False, in_letters: bool = False) -> list[Part]:
    parser = MiniMaxM3Format().parser([FUNCTION])
    pieces = list(text) if in_letters else [text]
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def arguments_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "arguments")


def in_call(tags: str) -> str:
    written = tags.replace("<", f"{MARK}<")
    return f'{MARK}<tool_call>\n{MARK}<invoke name="save">{written}{MARK}</invoke>\n{MARK}</tool_call>'


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("tags", "value"),
    [
        ("<text>12</text>", {"text": "12"}),
        ('<text> "ü"\n[</text>', {"text": ' "ü"\n['}),
        ("<place><zip>00120</zip><rooms><item>1</item><item>b</item></rooms></place>",
         {"place": {"zip": "00120", "rooms": [1, "b"]}}),
        ("<maybe>\n<zip>1</zip>\n</maybe>", {"maybe": {"zip": "1"}}),
        ("<maybe>null</maybe>", {"maybe": None}),
        ("<places><item><zip>1</zip></item><item></item></places>", {"places": [{"zip": "1"}, {}]}),
        ("<list></list><either>12 or so</either>", {"list": [], "either": "12 or so"}),
        ("<text>a</text><number></number><place></place>", {"text": "a", "place": {}}),
        ("<number></number><text>a</text>", {"text": "a"}),
        ("<list>[1, 2]</list><either>12</either>", {"list": [1, 2], "either": 12}),
        ("<free><a><item>x</item></a><b>True</b></free><code>1</code>",
         {"free": {"a": ["x"], "b": True}, "code": "1"}),
        ("<item><item>a</item></item>", {"item": {"item": "a"}}),
        ("<free>" + "<item>" * 60 + "</item>" * 60 + "</free>", None),
    ],
)  # fmt: skip
def test_minimax_m3_nested_values_follow_schema(tags: str, value: Any) -> None:
    text = in_call(tags)
    whole = read(text)
    assert read(text, in_letters=True) == whole
    assert whole[0] == Part("call", "save")
    assert value is None or json.loads(arguments_of(whole)) == value
    assert [part.kind for part in whole] == ["call", "arguments"]
    for cut in range(0, len(text), 1 + len(text) // 80):
        parts = read(text[:cut], is_cut=True)
        assert read(text[:cut], is_cut=True, in_letters=True) == parts
        assert arguments_of(whole).startswith(arguments_of(parts)), f"cut at {cut}"
        assert not any(part.kind == "content" for part in parts), f"cut at {cut}"


@pytest.mark.parametrize(
    "text",
    [
        f"{MARK}<text>it is",
        f"{MARK}<place>{MARK}<zip>1{MARK}</zip>{MARK}</text>",
        f"{MARK}<free>" + f"{MARK}<a>" * 99,
        f"{MARK}<list>1, 2",
    ],
)
def test_broken_minimax_m3_call_is_content(text: str) -> None:
    written = in_call("").removesuffix(f"{MARK}</invoke>\n{MARK}</tool_call>") + text
    whole = read(written)
    assert read(written, in_letters=True) == whole
    assert whole == [Part("content", written)]


@pytest.mark.parametrize("left", ["", "</item", "item>"])
@pytest.mark.parametrize("key", ["place", "free"])
def test_minimax_m3_value_never_contains_next_item(key: str, left: str) -> None:
    value = {"place": "<rooms><item>a</item><item>b</item></rooms>", "free": "<item>a</item><item>b</item>"}[key]
    text = in_call(f"<{key}>{value.replace('</item>', left, 1)}</{key}>")
    assert read(text) == read(text, in_letters=True) == [Part("content", text)]


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_minimax_m3_grammar_enforces_nested_schemas(kind: str) -> None:
    form = MiniMaxM3Format
    grammars = Grammars(kind, [*form.markers])
    forced = StructuredOutputsParams(grammar=form(grammars.token_name).forced([FUNCTION], only_one=True))
    good = {"text": "a", "places": [{"zip": "1", "rooms": [[], {"b": "c"}]}], "list": [1, 2], "code": "2"}
    assert grammars.accepts(forced, form().write([("save", good)]))
    for wrong in ({"text": ""}, {"list": ["a"]}, {"places": [{"town": "x"}]}, {"code": "3"}, {"other": 1}):
        assert not grammars.accepts(forced, form().write([("save", wrong)])), wrong


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": ["object", "null"], "properties": {"a": {"type": "string"}}}, [{"a": "x"}, None]),
        ({"type": "object"}, [{"b": "y"}, {}]),
    ],
)
def test_minimax_m3_grammar_accepts_every_allowed_type(schema: dict[str, Any], values: list[Any]) -> None:
    form = MiniMaxM3Format
    grammars = Grammars("plain", [*form.markers])
    function = Function("save", {"type": "object", "properties": {"value": schema}, "required": ["value"]})
    forced = StructuredOutputsParams(grammar=form(grammars.token_name).forced([function], only_one=True))
    for value in values:
        assert grammars.accepts(forced, form().write([("save", {"value": value})])), value
