"""Arguments that are written as bare text, and the descriptions of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from octavo.server.answers.argument_values import is_text, part_of, property_of, value_text
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat
from octavo.server.answers.tools import Choice, Toolbox, read_function

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
ROOT = {"$defs": {"loop": {"$ref": "#/$defs/loop"}, "text": STRING, "object": {"type": "object", "title": "found"}}}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("12", STRING, "12"),
        (" a ", STRING, " a "),
        ("12", INTEGER, 12),
        (" 12\n", INTEGER, 12),
        ("12", NUMBER, 12),
        ("1.5", NUMBER, 1.5),
        ("12", {"type": ["string", "null"]}, "12"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("[1]", {"type": "array"}, [1]),
        ("[1", {"type": ["array", "string"]}, "[1"),
        ("ü", {}, "ü"),
        ("NaN", {}, "NaN"),
        ("12", {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "12"),
    ],
)
def test_bare_text_becomes_value_of_schema_type(text: str, schema: Any, expected: Any) -> None:
    written = value_text(text, schema, ROOT)
    assert json.loads(written) == expected
    assert type(json.loads(written)) is type(expected)
    assert "\\u" not in written


def test_is_text_requires_string_only_schema() -> None:
    assert is_text(STRING, ROOT)
    assert is_text({"$ref": "#/$defs/text"}, ROOT)
    assert not is_text({"type": ["string", "null"]}, ROOT)
    assert not is_text({"$ref": "#/$defs/loop"}, ROOT)
    assert not is_text({}, ROOT)


def test_property_without_schema_allows_anything() -> None:
    assert property_of({"properties": {"a": STRING, "b": True}}, "a", {}) == STRING
    assert property_of({"properties": {"b": True}}, "b", {}) == {}
    assert property_of({"properties": {"a": STRING}}, "c", {}) == {}
    assert property_of({"properties": []}, "a", {}) == property_of({}, "a", {}) == {}


@pytest.mark.parametrize(
    ("schema", "title"),
    [
        ({"type": "object", "title": "itself"}, "itself"),
        ({"title": "untyped"}, "untyped"),
        ({"$ref": "#/$defs/object"}, "found"),
        ({"anyOf": [STRING, {"$ref": "#/$defs/object"}, {"type": "object", "title": "later"}]}, "found"),
        ({"oneOf": [{"anyOf": [STRING, {"type": "object", "title": "nested"}]}, {"$ref": "#/$defs/object"}]}, "nested"),
        ({"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/object"}]}, "found"),
        ({"anyOf": [STRING, True]}, None),
        (STRING, None),
    ],
)
def test_part_of_returns_first_object_schema(schema: Any, title: str | None) -> None:
    assert part_of(schema, ROOT, "object").get("title") == title


def made(*names: str, choice: Choice | None = None, tool_format: Any = None, **options: Any) -> Toolbox:
    described = [(Function(name, {"type": "object"}), f"about {name}") for name in names]
    return Toolbox.make(described, tool_format or HermesFormat(), choice, **options)


def test_tool_choice_naming_unknown_tool_is_refused() -> None:
    for choice in (Choice("required", "b"), Choice("auto", allowed=frozenset("abcd"))):
        with pytest.raises(RequestError, match="tool_choice names 'b', but no tool has that name") as refused:
            made("a", choice=choice)
        assert refused.value.parameter == "tool_choice"
    with pytest.raises(RequestError, match=f"names '{'x' * 64}', but no tool"):
        made("a", choice=Choice("required", "x" * 99))


@pytest.mark.turn(12)
def test_duplicate_or_too_many_tools_are_refused() -> None:
    with pytest.raises(RequestError, match="two tools have the same name"):
        made("a", "b", "a")
    assert len(made(*(f"t{index}" for index in range(128))).functions) == 128
    with pytest.raises(RequestError, match="tools are given; the limit is"):
        made(*(f"t{index}" for index in range(10_000)))


def test_tool_choice_selects_tools() -> None:
    assert made("a", choice=Choice("none")) == made() == Toolbox()
    with pytest.raises(RequestError, match="tool"):
        made(choice=Choice("required"))
    limited = made("a", "b", choice=Choice("auto", allowed=frozenset("b")))
    assert ([each.name for each in limited.functions], limited.is_limited, len(limited.given)) == (["b"], True, 2)
    named = made("a", "b", choice=Choice("required", "a"))
    assert (named.is_required, named.named, named.is_limited) == (True, "a", False)
    assert (made("a", parallel=False).only_one, made("a", parallel=True).only_one) == (True, False)
    assert made("a").given[0]["function"] == {"name": "a", "description": "about a", "parameters": {"type": "object"}}


def test_tools_combine_only_with_json_output() -> None:
    content = StructuredOutputsParams(regex="a")
    assert Toolbox().structure(content) is content
    with pytest.raises(RequestError, match="tools go with JSON only"):
        made("a").structure(content)
    assert made("a").structure(None) is None
    assert made("a").structure(StructuredOutputsParams(json_object=True)) is not None


def test_parameters_up_to_max_grammar_chars_are_accepted() -> None:
    from octavo.server.answers.tools import _bounded
    from octavo.structured_output.lark import lark_json
    from octavo.structured_output.schema_faults import FIELD

    def function(num_chars: int) -> Function:
        return Function("a", {"const": "x" * (num_chars - len(lark_json({"const": "", FIELD: "tools"})))})

    assert len(_bounded([function(MAX_GRAMMAR_CHARS)])) == 1
    with pytest.raises(RequestError, match=f"have more than {MAX_GRAMMAR_CHARS} characters"):
        _bounded([function(MAX_GRAMMAR_CHARS + 1)])


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        (None, "tools[0]"),
        ({}, "tools[0].name"),
        ({"name": 7}, "tools[0].name"),
        ({"name": ""}, "tools[0].name"),
        ({"name": "a b"}, "tools[0].name"),
        ({"name": "a" * 129}, "tools[0].name"),
        ({"name": "a", "description": 7}, "tools[0].description"),
        ({"name": "a", "parameters": []}, "tools[0].parameters"),
        ({"name": "a", "parameters": {"type": "array"}}, "tools[0].parameters"),
    ],
)
def test_invalid_tool_description_error_names_field(fields: Any, parameter: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_function(fields, "tools[0]")
    assert refused.value.parameter == parameter


def test_tool_description_is_read() -> None:
    assert read_function({"name": "a" * 128}, "tools[0]")[1] == ""
    schema = {"properties": {"x": STRING}}
    function, about = read_function({"name": "a", "description": "b", "input": schema, "strict": True}, "x", "input")
    assert (function.name, function.strict, about) == ("a", True, "b")
    assert (function.parameters["type"], function.parameters["properties"]) == ("object", {"x": STRING})
    assert not read_function({"name": "a", "strict": 1}, "x")[0].strict
