"""Schemas as users write them: objects are closed, unknown formats ignored, and errors reported with their place."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import jsonschema
import pytest
from call_grammars import Grammars

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output import schema_rewriting
from octavo.structured_output.lark import lark_json
from octavo.structured_output.lookahead import without_lookahead
from octavo.structured_output.schema_rewriting import FORMATS, rewritten

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
DEFINITIONS = {"A": A, "B": B}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # of zod
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # of pydantic
PRICE = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"  # 5 digits, 2 of them decimal places
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)"  # 4 digits


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars("plain", [])


def accepted(grammars: Grammars, schema: dict[str, Any], *values: Any) -> list[Any]:
    """Return the values that both ways of passing a schema accept. Checks that the two agree."""
    structures = [StructuredOutputsParams(json=schema), StructuredOutputsParams(grammar=f"start: {lark_json(schema)}")]
    found = [
        [value for value in values if grammars.accepts(each, json.dumps(value, ensure_ascii=False))]
        for each in structures
    ]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, [{"a": 1}], [{"a": 1, "c": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"c": 1}]),
        ({"type": "object", "properties": {"n": A}}, [{"n": {"a": 1}}, {}], [{"n": {"a": 1, "c": 1}}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "c": 1}]]),
        ({"$defs": DEFINITIONS, "$ref": "#/$defs/A"}, [{"a": 1}], [{"a": 1, "c": 1}]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}, {"a": 1}]),
        (
            {"definitions": DEFINITIONS, "allOf": [{"$ref": "#/definitions/A"}, {"$ref": "#/definitions/B"}]},
            [{"a": 1, "b": 2}],
            [{"a": 1, "b": 2, "c": 3}, {"a": 1}],
        ),
        (
            {"$defs": DEFINITIONS, "$ref": "#/$defs/A", "properties": {"k": {"const": 1}}},
            [{"a": 1}, {"a": 1, "k": 1}],
            [{"a": 1, "k": 1, "c": 3}],
        ),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"a": 1, "c": 1}]),
        (
            {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "oneOf": [A, B]},
            [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
            [{"k": 1, "a": 1, "b": 1}, {"k": 1, "a": 1, "c": 1}, {"k": 1}],
        ),
        (
            {
                **A,
                "properties": {"a": {}, "b": {}},
                "required": [],
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
            [{}, {"a": 1, "c": 1}],
        ),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}], [{"n": {"c": 1}}]),
        (
            {"properties": {"q": {"$ref": "#/components/schemas/A"}}, "components": {"schemas": DEFINITIONS}},
            [{"q": {"a": 1}}],
            [{"q": {"a": 1, "c": 1}}],
        ),
        ({**A, "required": ["a", "z"]}, [{"a": 1, "z": 2}], [{"a": 1}, {"a": 1, "z": 2, "c": 1}]),
        ({"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    ],
)
def test_objects_are_closed_after_merging(grammars: Grammars, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    before = json.dumps(schema)
    assert accepted(grammars, schema, *right, *wrong) == right
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "open_value"),
    [
        ({"type": "object"}, {"c": 1}),
        ({**A, "additionalProperties": True}, {"a": 1, "c": 1}),
        ({**A, "additionalProperties": {"type": "string"}}, {"a": 1, "c": "x"}),
        ({**A, "patternProperties": {"^c": {}}}, {"a": 1, "c": 1}),
        ({**A, "patternProperties": {"^c": {}}}, {"a": 1, "d": 1}),
        ({**A, "unevaluatedProperties": True}, {"a": 1, "c": 1}),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, {"a": 1, "b": 1, "c": 1}),
        ({**A, "minProperties": 2}, {"a": 1, "c": 1}),
    ],
)
def test_object_stays_open_if_schema_allows_other_properties(grammars: Grammars, schema: Any, open_value: Any) -> None:
    assert accepted(grammars, schema, open_value) == [open_value]


def test_shared_definition_is_closed_alone_and_open_in_merge(grammars: Grammars) -> None:
    schema = {
        "$defs": {"A": A, "Both": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/Both"}]},
    }
    right = [[{"a": 1}], [{"a": 1, "b": 2}]]
    assert accepted(grammars, schema, *right, [{"a": 1, "c": 2}], [{"a": 1, "b": 2, "c": 2}]) == right


def test_recursive_and_deeply_nested_merges_terminate() -> None:
    node: dict[str, Any] = {"properties": {"n": {}}, "allOf": [{"$ref": "#/$defs/N"}]}
    assert rewritten({"$defs": {"N": node}, "$ref": "#/$defs/N"})["$ref"] == "#/$defs/N"
    deep: dict[str, Any] = {}
    for _ in range(60):  # each level is nested twice: a walk that visits parts twice would not end
        deep = {"anyOf": [{"required": ["a"], "anyOf": [deep]}], "properties": {"a": {}}}
    assert rewritten(deep)["properties"] == {"a": {}}


def test_unknown_formats_are_ignored_and_logged_once(grammars: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    schema_rewriting._named_formats.cache_clear()
    formats = ["binary", "password", "path", "jwt", "uri-reference", "idn-email", "int32", "x" * 500]
    schema = {"type": "array", "items": {"anyOf": [{"type": "string", "format": each} for each in formats]}}
    with caplog.at_level(logging.WARNING):
        assert accepted(grammars, schema, ["\u00fc a\n"]) == [["\u00fc a\n"]]
        for number in range(200):
            rewritten({"format": f"made-up-{number}"})
    assert len(caplog.records) == 100
    assert [each.message for each in caplog.records if "'jwt'" in each.message] == [
        "the format 'jwt' of a JSON schema is unknown: any string is accepted"
    ]
    schema_rewriting._named_formats.cache_clear()


def test_known_formats_are_enforced_by_grammar_compiler(grammars: Grammars) -> None:
    for name in FORMATS:
        grammars.compile(StructuredOutputsParams(json={"type": "string", "format": name}))
    assert accepted(grammars, {"type": "string", "format": "date"}, "2026-02-30", "x") != ["2026-02-30", "x"]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, [{"q": 1}], [{"q": "x"}]),
        (
            {"propertyNames": {"type": "string", "pattern": "^[a-z]$"}, "additionalProperties": {"type": "integer"}},
            [{"q": 1}, {}],
            [{"qq": 1}, {"q": "x"}],
        ),
        ({"propertyNames": {"enum": ["q", "r"]}, "additionalProperties": {}}, [{"q": 1, "r": 2}, {"r": 1}], [{"s": 1}]),
        ({"properties": {"a": {}, "b": {"not": {}}}}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"properties": {"a": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}}, [{"a": 1}], [{"a": 0}]),
        ({"properties": {"a": {"uniqueItems": False}}, "$schema": "https://spec.openapis.org/3.1"}, [{"a": 1}], []),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {"type": "string"}}},
                    {"type": "object", "properties": {"b": {"type": "string"}}},
                ]
            },
            [{"a": "x"}, {"b": "x"}, {}],  # the last one fits both
            [{"a": 1}, {"c": 1}],
        ),
    ],
)
def test_schema_constructs_of_code_generators_are_supported(
    grammars: Grammars, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    assert accepted(grammars, {"type": "object", **schema}, *right, *wrong) == right


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (EMAIL, ["a.b@c.de", "o'x+1@a-b.c.org"], [".a@b.cd", "a..b@c.de", "a@b", "a.@b.cd"]),
        (DECIMAL, ["1", "-0.50", "007", "1.", ".5"], ["", "+", ".", "1e5", "--1", "1.2.3"]),
        (PRICE, ["123.45", "00012.3", "1.5000"], ["", "-.", "1234", "1234.5", "1.234", "12x"]),
        (DIGITS, ["12.34", "1234", ".1234", "1.2000000"], ["", ".", "12.345", "12345", "12345."]),
        (r"^(?=.*[a-z])(?=.*\d)[a-z\d]{3,}$", ["ab1", "1aa"], ["abc", "123", "a1"]),
        (r"^(?!(?:con|prn)$)[a-z]+$", ["cons", "co", "a"], ["con", "prn"]),
        (r"^(?!00)\d{3}$", ["010", "100"], ["001"]),
        (r"^(?!.*ab)[a-c]+$", ["ba", "acb"], ["cab", "aab"]),
        (r"^(?!\$)\S+$", ["a$"], ["$a"]),
        (r"^(?!\s*$).+$", ["a", " a"], ["", " "]),
        (r"^(?!.*\s)\S+$", ["a"], ["a b"]),
        (r"^(?!.*-)[a-z]*$", ["", "a"], ["a-b"]),
        (r"^(?=[a-z]|[0-9])[a-zA-Z0-9]+$", ["a1", "1A"], ["A1", "Aa"]),
    ],
)
def test_supported_lookahead_is_rewritten(grammars: Grammars, pattern: str, right: list[str], wrong: list[str]) -> None:
    assert all(re.search(pattern, each) for each in right)
    assert accepted(grammars, {"type": "string", "pattern": pattern}, *right, *wrong) == right
    rewriting = without_lookahead(pattern)
    assert rewriting is not None
    for text in (*right, *wrong, "aa1", "con.prn", "a-b@c.dd", "000", "12.3456"):
        assert re.search(pattern, text) or not all(re.search(each, text) for each in rewriting)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d{0,3}\.\d{0,2}0*$)",
        "a(?=b)",
        "^(?<!a)b$",
        "^((?!x).)*$",
        "^(?!.*abc)x",
        r"^(?!0{3})\d+$",
        "^(?!a",
        "^(?=a(?!b))a",
    ],
)
def test_unsupported_lookahead_is_refused_with_pattern_and_path(grammars: Grammars, pattern: str) -> None:
    schema = {"$defs": {"T": {**A, "properties": {"~x/y": {"pattern": pattern}}}}, "items": {"$ref": "#/$defs/T"}}
    for structure in (
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(grammar=f"start: {lark_json(schema)}"),
    ):
        with pytest.raises(RequestError, match=r"look-around|unclosed group") as caught:
            grammars.compile(structure)
        assert f": #/$defs/T/properties/~0x~1y: the pattern `{pattern}` cannot be used: " in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"not": {"const": 1}}}}}, '#/properties/a/items: the keywords "not" are not '),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/properties/a: Pointer '/$defs/none' does not exist"),
        ({"properties": {"a": {"anyOf": [{}, {"type": "str"}]}}}, "#/properties/a/anyOf/1: Invalid type: str"),
        ({"properties": {"a": {"required": True}}}, "#/properties/a: Expected array for 'required', got true"),
        ({"$defs": {"unused": {"type": "str"}}, "type": "any"}, "#: Invalid type: any"),
    ],
)
def test_invalid_schema_error_names_json_pointer(grammars: Grammars, schema: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(StructuredOutputsParams(json=schema))
    assert str(caught.value).startswith(f"json: {message}")
    assert caught.value.parameter == "structured_outputs"


def test_unsupported_regex_error_names_lookahead(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=r'regex: .*"a\(\?=b\)".*look-around, .* is not supported'):
        grammars.compile(StructuredOutputsParams(regex="a(?=b)"))


def test_closed_schemas_accept_subset_of_original_schemas() -> None:
    for schema in ({"allOf": [A, B]}, {"anyOf": [A, B]}, {**A, "oneOf": [{"required": ["z"]}, B]}):
        for value in ({"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "z": 1}, {"a": 1, "b": 1, "c": 1}):
            if jsonschema.Draft202012Validator(rewritten(schema)).is_valid(value):
                assert jsonschema.Draft202012Validator(schema).is_valid(value) or "oneOf" in schema


def test_merge_above_property_limit_is_refused(grammars: Grammars) -> None:
    names = {f"p{number}": {} for number in range(1000)}
    options = [{"required": [f"p{number}"]} for number in range(1000)]
    chain: dict[str, Any] = {f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}, A]} for number in range(300)}
    for schema in ({"properties": names, "anyOf": options}, {"$defs": chain, "$ref": "#/$defs/d0"}):
        with pytest.raises(RequestError, match=r"json: allOf, anyOf, .* merge more than 50000 properties"):
            grammars.compile(StructuredOutputsParams(json=schema))
    few = {"properties": dict(list(names.items())[:30]), "anyOf": options[:30]}
    assert accepted(grammars, few, {"p3": 1}, {"c": 1}) == [{"p3": 1}]


@pytest.mark.parametrize("field", [7, ["a"], "own"])
def test_client_written_internal_field_is_harmless(grammars: Grammars, field: Any) -> None:
    with pytest.raises(RequestError, match=r": #: Invalid type: str") as caught:
        grammars.compile(StructuredOutputsParams(json={"type": "str", "x-octavo-field": field}))
    assert caught.value.parameter == (field if field == "own" else "structured_outputs")


def test_fault_search_in_large_schema_terminates(grammars: Grammars) -> None:
    properties = {f"p{number}": {"enum": ["x" * 20, number]} for number in range(400)} | {"last": {"type": "str"}}
    with pytest.raises(RequestError, match=r"^json: #"):
        grammars.compile(StructuredOutputsParams(json={"properties": properties, "$defs": {"large": properties}}))
