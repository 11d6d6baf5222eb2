"""Clients can request the structure of an answer through each of the known fields."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.api.sampling import read_response_format

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": None, "value": None}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": {}}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"type": "json_object", "schema": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
        ({"type": "json_object", "value": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
    ],
)
def test_response_format_becomes_structured_outputs(
    given: dict[str, Any] | None, expected: StructuredOutputsParams | None
) -> None:
    assert read_response_format(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json_object", "must be an object"),
        ({}, "type must be text"),
        ({"type": "yaml"}, "type must be text"),
        ({"type": "json_schema"}, r"json_schema\.schema must be a JSON schema"),
        ({"type": "json_schema", "json_schema": {"schema": "a"}}, r"json_schema\.schema must be a JSON schema"),
        ({"type": "json_object", "value": "a"}, r"value must be a JSON schema"),
        ({"type": "json_object", "schema": []}, r"schema must be a JSON schema"),
    ],
)
def test_invalid_response_format_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_response_format(given)
    assert caught.value.parameter == "response_format"
