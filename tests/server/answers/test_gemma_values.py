"""Values with an unspecific schema in the grammar of Gemma's calls."""

from __future__ import annotations

from typing import Any

import pytest
from call_grammars import Grammars

from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.tool_format import Function


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars("special", [*GemmaFormat.markers])


@pytest.mark.parametrize(
    ("schema", "value", "wrong"),
    [
        ({"type": "array"}, [1, "x", []], None),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2], ["x"]),
        ({"type": ["array", "string"], "items": {"type": "integer"}}, "x", None),
        ({"enum": ["a", 1]}, "a", "b"),
        ({"const": "a"}, "a", "b"),
        ({"type": "boolean"}, True, "true"),
        ({"type": "string"}, "x", 1),
    ],
)
def test_gemma_grammar_enforces_value_schema(grammars: Grammars, schema: Any, value: Any, wrong: Any) -> None:
    form = GemmaFormat(grammars.token_name)
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    structure = StructuredOutputsParams(grammar=form.forced([Function("f", parameters)], only_one=True))
    assert grammars.accepts(structure, form.write([("f", {"a": value})]))
    assert wrong is None or not grammars.accepts(structure, form.write([("f", {"a": wrong})]))
