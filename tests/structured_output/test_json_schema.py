"""Objects with many optional properties are served up to a limit. Above it they are refused before any token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo import assets
from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammars import GrammarCompiler, Vocabulary
from octavo.structured_output.json_schema import MAX_OPTIONAL_PROPERTIES, refuse_large_objects
from octavo.structured_output.lark import lark_json

EOS = 2


def names(count: int) -> dict[str, Any]:
    return {f"p{index}": {} for index in range(count)}


@pytest.mark.turn(12)
def test_object_above_optional_property_limit_is_refused() -> None:
    text = (Path(assets.__file__).parent / "demo" / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size()
    vocabulary = Vocabulary(text, size, frozenset({EOS}), tokenizer.token_to_id, frozenset())
    compiler = GrammarCompiler(lambda: vocabulary, size)
    schema = {"properties": names(MAX_OPTIONAL_PROPERTIES), "additionalProperties": False, "type": "object"}
    matcher = compiler.compile(StructuredOutputsParams(json=schema))
    last = MAX_OPTIONAL_PROPERTIES - 1
    matcher.advance(tokenizer.encode(f'{{"p3": 1, "p{last}": 2}}', add_special_tokens=False).ids)
    assert matcher.allowed()[EOS]
    with pytest.raises(RequestError, match=r"2001 properties that are not required; the limit is 2000") as caught:
        compiler.prepare(StructuredOutputsParams(json={"properties": names(MAX_OPTIONAL_PROPERTIES + 1)})).result()
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda large: large,
        lambda large: {"items": large},
        lambda large: {"anyOf": [{"type": "null"}, large]},
        lambda large: {"properties": {"const": large}},
        lambda large: {"$defs": {"enum": large}},
    ],
)
def test_nested_object_above_optional_property_limit_is_refused(wrap: Any) -> None:
    schema = wrap({"properties": names(MAX_OPTIONAL_PROPERTIES + 1)})
    for spelled in (schema, json.dumps(schema)):
        with pytest.raises(RequestError, match="not required"):
            refuse_large_objects(spelled, "json", None)
    with pytest.raises(RequestError, match="function's parameters"):
        lark_json(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": names(2500), "required": [f"p{index}" for index in range(500)]},
        {"const": {"properties": names(2500)}},
        {"properties": 7, "required": 7},
        "no JSON",
        "[" * 100_000,
    ],
)
def test_schema_within_optional_property_limit_passes(schema: Any) -> None:
    refuse_large_objects(schema, "json", None)
