"""An argument's types and text follow from its schema, in time proportional to the schema's length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_grammars import Grammars

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.argument_values import json_of, known_keys, types_of, value_text
from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.nested_calls import MiniMaxM3Format
from octavo.server.answers.python_calls import LFM2Format, PythonicFormat
from octavo.server.answers.tagged_calls import GLMFormat, Qwen3CoderFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat
from octavo.server.answers.tools import read_chat_tools

DEFINITIONS: dict[str, Any] = {
    "town": {"type": "object", "properties": {"in": {"$ref": "#/$defs/land~1county"}}},
    "land/county": {"type": "object", "properties": {"towns": {"type": "array", "items": {"$ref": "#/$defs/town"}}}},
    "other": {"type": "string"},
}
ALL = {"null", "boolean", "integer", "number", "string", "array", "object"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null", 7]}, {"integer", "null"}),
        ({"type": "text"}, ALL),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"const": 1.5}]}]}, {"string", "number"}),
        ({"anyOf": [{"type": "string"}, {}]}, ALL),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, {"string"}),
        ({"$ref": "#/$defs/town"}, {"object"}),
        ({"anyOf": [{"$ref": "#/$defs/other"}, {"$ref": "#/$defs/other"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/none"}, ALL),
        ({}, ALL),
        (True, ALL),
    ],
)
def test_types_of_resolves_schema_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema, {"$defs": DEFINITIONS}) == types


def test_mutual_references_are_followed_once() -> None:
    """Following every occurrence would take 300 ** 4 steps."""
    parts = {"a": {"anyOf": [{"$ref": "#/$defs/b"}] * 300}, "b": {"anyOf": [{"$ref": "#/$defs/a"}] * 300}}
    assert types_of({"$ref": "#/$defs/a"}, {"$defs": parts}) == ALL
    parts["b"]["anyOf"].append({"type": "string"})
    assert types_of({"$ref": "#/$defs/a"}, {"$defs": parts}) == {"string"}


def test_json_of_includes_only_referenced_definitions() -> None:
    def definitions(schema: dict[str, Any]) -> Any:
        return json.loads(json_of(schema, {"$defs": DEFINITIONS}).removeprefix("%json ")).get("$defs", {})

    assert len(definitions({"type": "array", "items": {"$ref": "#/$defs/town"}})) == 2
    assert [*definitions({"$ref": "#/$defs/other"}).values()] == [{"type": "string"}]
    assert definitions({"type": "integer"}) == {}


@pytest.mark.parametrize("family", [Qwen3CoderFormat, PythonicFormat, HermesFormat])
def test_references_resolve_anywhere_in_parameters(family: Any) -> None:
    """Some programs write the second occurrence of a schema as a reference to the first one."""
    grammars = Grammars("plain", [])
    parameters = {
        "type": "object",
        "properties": {
            "from": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            "to": {"type": ["object"], "allOf": [{"$ref": "#/properties/from"}]},
            "way": {"type": "array", "items": {"anyOf": [{"const": {"$ref": "#/a"}}, {"type": "null"}]}},
            "more": {"type": "array", "items": {"$ref": "#/properties/way/items/anyOf/1"}},
            "again": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["from"],
        "additionalProperties": False,
    }
    form = family(grammars.token_name)
    structure = StructuredOutputsParams(grammar=form.forced([Function("go", parameters)], only_one=True))
    one = {"x": 1}
    given = {"from": one, "to": one, "way": [{"$ref": "#/a"}, None], "more": [None], "again": [{"from": one}]}
    assert grammars.accepts(structure, form.write([("go", given)]))
    for wrong in ({"to": {"x": "a"}}, {"more": [1]}, {"again": [{"to": one}]}):
        assert not grammars.accepts(structure, form.write([("go", {"from": one, **wrong})]))


@pytest.mark.parametrize("family", [Qwen3CoderFormat, PythonicFormat])
def test_oversized_parameters_are_refused_before_grammar_is_built(family: Any) -> None:
    written = [0]

    class Counted(family):
        def forced(self, *args: Any, **kwargs: Any) -> str:
            text: str = super().forced(*args, **kwargs)
            written[0] = len(text)
            return text

    def structure(num_properties: int) -> Any:
        defined = {"all": {"enum": [f"value {index}" for index in range(num_properties)]}}
        properties = {f"p{index}": {"$ref": "#/$defs/all"} for index in range(num_properties)}
        parameters = {"type": "object", "properties": properties, "$defs": defined}
        tools = [{"type": "function", "function": {"name": "pick", "parameters": parameters}}]
        return read_chat_tools(tools, "required", None, Counted()).structure(None)

    assert structure(20) is not None
    written[0] = 0
    with pytest.raises(RequestError, match="more than 65536 characters"):
        structure(1900)
    assert written == [0]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", [Qwen3CoderFormat, GLMFormat])
@pytest.mark.parametrize("kind", ["plain", "added"])
@pytest.mark.parametrize(
    ("schema", "text", "others"),
    [
        ({"pattern": "^https?://[^/]+/?$"}, "https://a.org/", ["ftp://a.org", "https://a.org/b"]),
        ({"pattern": "^[0-9]+\\$"}, "12$ or so", ["12", "a12$"]),
        ({"pattern": "b+"}, "abba", ["a"]),
        ({"minLength": 2, "maxLength": 3}, "狐狐狐", ["狐", "狐狐狐狐"]),
        ({"maxLength": 1}, "", ["ab"]),
    ],
)
def test_grammar_enforces_schema_of_bare_string(
    family: Any, kind: str, schema: Any, text: str, others: list[str]
) -> None:
    grammars = Grammars(kind, list(family.markers))
    form = family(grammars.token_name)
    parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    structure = StructuredOutputsParams(grammar=form.forced([Function("now", parameters)], only_one=True))
    assert grammars.accepts(structure, form.write([("now", {"a": text})]))
    assert not any(grammars.accepts(structure, form.write([("now", {"a": each})])) for each in others)


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {}}}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}}, True),
        ({"type": "object", "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}}, True),
        ({"type": "object", "properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, False),
    ],
)
def test_object_with_properties_is_closed_by_default(schema: Any, is_open: bool) -> None:
    assert (known_keys(schema) is None) is is_open


CLOSED_FAMILIES = [PythonicFormat, LFM2Format, Qwen3CoderFormat, GLMFormat, MiniMaxM3Format, GemmaFormat]


@pytest.mark.parametrize("family", CLOSED_FAMILIES)
def test_tool_call_grammar_closes_objects_with_properties(family: Any) -> None:
    grammars = Grammars("plain", [])
    form = family(grammars.token_name)
    for fields, is_open in (({"properties": {}}, False), ({"properties": {}, "additionalProperties": True}, True)):
        function = Function("now", {"type": "object", **fields})
        structure = StructuredOutputsParams(grammar=form.forced([function], only_one=True))
        assert grammars.accepts(structure, form.write([("now", {})]))
        assert grammars.accepts(structure, form.write([("now", {"a": 1})])) is is_open, fields


@pytest.mark.parametrize(("text", "written"), [("ä", '"ä"'), ("12", "12"), ("true", '"true"'), ("[ü", '"[ü"')])
def test_value_text_keeps_text_if_schema_allows_string(text: str, written: str) -> None:
    schema = {"type": ["string", "integer"]}
    assert value_text(text, schema, schema) == written


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"a": {}}}, {"a"}),
        ({"properties": {"a": {}}, "additionalProperties": True}, None),
        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a", "b"}),
        ({"anyOf": [{"properties": {"a": {}}}, {"type": "object"}]}, None),
        ({"anyOf": [{"type": "object"}, {"properties": {"a": {}}}]}, None),
        ({"oneOf": [{"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, {"properties": {}}]}, None),
    ],
)
def test_property_names_are_known_unless_an_alternative_allows_any(
    schema: dict[str, Any], names: set[str] | None
) -> None:
    assert known_keys(schema) == names
