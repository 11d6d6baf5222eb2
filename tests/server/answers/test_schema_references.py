"""References within a schema are JSON pointers (RFC 6901)."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.answers.argument_values import types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "a/b": {"type": "string"},
        "a~b": {"type": "integer"},
        "a~1b": {"type": "null"},
        "list": [{"type": "boolean"}, {"type": "array"}],
    }
}
ALL = {"null", "boolean", "integer", "number", "string", "array", "object"}


@pytest.mark.parametrize(
    ("pointer", "types"),
    [
        ("a~1b", {"string"}),
        ("a~0b", {"integer"}),
        ("a~01b", {"null"}),  # ~1 is replaced before ~0: this is the key "a~1b", not "a/b"
        ("list/0", {"boolean"}),
        ("list/1", {"array"}),
        ("list/2", ALL),
        ("list/-1", ALL),
        ("a~1b/type", ALL),
    ],
)
def test_schema_reference_resolves_as_json_pointer(pointer, types):
    assert types_of({"$ref": f"#/$defs/{pointer}"}, ROOT) == types
