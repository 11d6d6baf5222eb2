"""Call formats other than JSON read arguments by `$ref`, `allOf`, `anyOf` and patterns, and enforce these."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_grammars import Grammars
from public_schemas import PUBLIC_SCHEMAS

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.argument_values import known_keys, property_of, types_of
from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.nested_calls import MiniMaxM3Format
from octavo.server.answers.parts import joined
from octavo.server.answers.python_calls import LFM2Format, PythonicFormat
from octavo.server.answers.tagged_calls import GLMFormat, MiniMaxM2Format, Qwen3CoderFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tools import read_chat_tools
from octavo.structured_output.grammars import GrammarError
from octavo.structured_output.merging import MAX_EXPANDED, MAX_OPTIONS, alternatives, is_small, merged

TAGS = [Qwen3CoderFormat, MiniMaxM2Format, GLMFormat, MiniMaxM3Format]
FAMILIES = [*TAGS, KimiK3Format, GemmaFormat, PythonicFormat, LFM2Format]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": STRING}, "required": ["b"]}
# Parameters, allowed arguments, and forbidden arguments.
MERGES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{}, {"a": 1, "b": "x"}, {"b": "x"}]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "c": 1}]),
    "allOf with its own": (
        {**A, "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "anyOf": ({"anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{}, {"a": 1, "c": 1}]),
    "options of what is required": (
        {"properties": {"a": INTEGER, "b": STRING}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "x"}],
        [{}, {"c": 1}],
    ),
    "a property": (
        {
            "properties": {"o": {"allOf": [{"$ref": "#/$defs/A"}], "description": "."}},
            "required": ["o"],
            "$defs": {"A": A},
        },
        [{"o": {"a": 1}}],
        [{"o": {}}, {"o": {"b": "x"}}, {}],
    ),
}


def grammar_of(family: Any, parameters: dict[str, Any], grammars: Grammars) -> StructuredOutputsParams:
    form = family(grammars.token_name)
    return StructuredOutputsParams(
        grammar=form.forced([Function("go", {"type": "object", **parameters})], only_one=True)
    )


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MERGES)
def test_tool_call_grammars_enforce_merged_schemas(family: Any, name: str) -> None:
    parameters, right, wrong = MERGES[name]
    grammars = Grammars("added", list(family.markers))
    structure, form = grammar_of(family, parameters, grammars), family(grammars.token_name)
    assert all(grammars.accepts(structure, form.write([("go", each)])) for each in right)
    assert not any(grammars.accepts(structure, form.write([("go", each)])) for each in wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MERGES)
def test_parsers_type_arguments_by_merged_schemas(family: Any, name: str) -> None:
    parameters, right, _ = MERGES[name]
    for given in right:
        texts = {
            key: "1" if value == "x" else value for key, value in given.items()
        }  # a string that looks like a number
        parser = family().parser([Function("go", {"type": "object", **parameters})])
        parts = joined([*parser.feed(family().write([("go", texts)])), *parser.finish()])
        assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == texts


@pytest.mark.parametrize("family", FAMILIES)
def test_recursive_schema_has_grammar(family: Any) -> None:
    node = {"properties": {"n": INTEGER, "next": {"$ref": "#/$defs/node"}}, "required": ["n"]}
    parameters = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", **node}}}
    grammars = Grammars("added", list(family.markers))
    structure, form = grammar_of(family, parameters, grammars), family(grammars.token_name)
    assert grammars.accepts(structure, form.write([("go", {"n": 1, "next": {"n": 2}})]))
    assert not grammars.accepts(structure, form.write([("go", {"next": {"n": 2}})]))
    for loop in ({"anyOf": [{"$ref": "#"}, A]}, {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}):
        schema: dict[str, Any] = {"type": "object", **loop}
        assert types_of(schema, schema)
        assert alternatives(schema, schema)
        assert not is_small(loop, loop)
        grammar_of(family, loop, grammars)


def test_too_many_options_merge_into_one_schema() -> None:
    options = [{"properties": {f"p{index}": INTEGER, "kind": {"const": index}}} for index in range(MAX_OPTIONS + 1)]
    schema = {"type": "object", "anyOf": options}
    found, *others = alternatives(schema, schema)
    assert not others
    assert found["required"] == []
    assert known_keys(schema) == {"kind", *(f"p{index}" for index in range(MAX_OPTIONS + 1))}
    assert property_of(schema, "kind", schema) == {"anyOf": [{"const": index} for index in range(MAX_OPTIONS + 1)]}


def test_too_many_allof_members_allow_any_key() -> None:
    def many(count: int) -> dict[str, Any]:
        return {"allOf": [{"properties": {f"p{index}": INTEGER}} for index in range(count)]}

    assert known_keys(many(MAX_EXPANDED - 1)) == {f"p{index}" for index in range(MAX_EXPANDED - 1)}
    assert known_keys(many(MAX_EXPANDED)) is None


def test_merged_schema_combines_keywords() -> None:
    members = [
        {"type": ["string", "number"], "minimum": 1, "required": ["a"], "pattern": "a", "enum": [1, 2, 3]},
        {"type": ["integer", "null"], "minimum": 3, "required": ["a", "b"], "pattern": "b", "enum": [3, 4, 2]},
    ]
    assert merged({"allOf": members}, {}) == {
        "type": "integer",
        "minimum": 3,
        "required": ["a", "b"],
        "pattern": "a",
        "enum": [2, 3],
        "allOf": [{"pattern": "b"}],
    }


EMAIL = PUBLIC_SCHEMAS["zod 4: an email"].schema["properties"]["email"]
BOTH = {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}], "maxLength": 4}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("kind", ["plain", "added"])
@pytest.mark.parametrize("family", TAGS)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (EMAIL, ["o.k@example.org"], [".a@example.org", "a..b@example.org", "a@b", "a@example.org\nb"]),
        (BOTH, ["az", "abcz"], ["abcdz", "a", "z", "ba"]),
        ({**STRING, "pattern": "^[a-z]+$", "minLength": 2}, ["ab"], ["a", "aB"]),
    ],
)
def test_grammar_enforces_all_patterns_of_string(
    family: Any, kind: str, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammars = Grammars(kind, list(family.markers))
    form = family(grammars.token_name)
    structure = grammar_of(family, {"properties": {"s": schema}, "required": ["s"]}, grammars)
    assert all(grammars.accepts(structure, form.write([("go", {"s": each})])) for each in right)
    assert not any(grammars.accepts(structure, form.write([("go", {"s": each})])) for each in wrong)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", TAGS)
@pytest.mark.parametrize("pattern", [r"^(?!a.*b.*c)x", r"(a)\1", r"a(?<=b)c", "(unclosed", r"\p{Nothing}"])
def test_refused_pattern_error_names_field_and_path(family: Any, pattern: str) -> None:
    grammars = Grammars("added", list(family.markers))
    parameters = {"type": "object", "properties": {"a/b": {"allOf": [{"type": "string", "pattern": pattern}]}}}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": parameters}}]
    with pytest.raises((RequestError, GrammarError)) as refused:
        grammars.compile(read_chat_tools(tools, "required", None, family(grammars.token_name)).structure(None))
    message = str(refused.value)
    assert refused.value.parameter == "tools[0].function.parameters"
    assert message.startswith("tools[0].function.parameters: #/properties/a~1b/allOf/0: ")
    assert pattern in message
