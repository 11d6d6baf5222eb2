"""The grammars of every format of calls, as checksums of their texts.

Other tests check that a grammar allows the calls of its format. These checksums show that a change of the code
changed a grammar. After such a change on purpose, run the other tests of this folder, and record anew:

    cd tests; python -m server.answers.recorded_grammars > server/answers/grammars.txt
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.tool_format import Function, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = {each.__name__: each for each in (*FORMATS, GenericFormat)}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    {
        "type": "object",
        "properties": {
            "unit": {"enum": ["°C", "F"]},
            "kind": {"const": "x"},
            "level": {"enum": [1, "two", None]},
            "none": {"enum": []},
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "both": {"type": ["string", "boolean"]},
            "or": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}]},
        },
        "required": ["unit", "at"],
    },
    {"type": "object", "additionalProperties": True, "properties": {"known": {"type": "string"}}},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"part": {"$ref": "#/$defs/part"}},
        "$defs": {"part": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "null"}}, "required": ["b"]},
            {"type": "object", "properties": {}},
            {"type": "object", "properties": {"c": {"type": ["integer", "null"]}}, "additionalProperties": True},
        ]
    },
    {
        "type": "object",
        "properties": {
            "start:": {"type": "string", "pattern": "^a/b$", "minLength": 1},
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "object", "properties": {}}}},
            "either": {"anyOf": [{"type": "object", "properties": {"x": {"type": "number"}}}, {"const": "none"}]},
            "free": {},
            "any": {"type": "object"},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "texts": {"enum": ["a", "b"]},
            "is": {"type": "boolean"},
            "nothing": {"type": "null"},
            'q"&': {"type": "string", "maxLength": 9, "allOf": [{"pattern": "x"}, {"pattern": "y$"}]},
        },
        "required": ["rows", "is", "start:"],
    },
    {"type": "object", "properties": {"node": {"$ref": "#"}, "kind": {"oneOf": [{"const": 1}, {"const": 2}]}}},
]
FUNCTIONS = [Function(f"tool_{index}", schema, strict=index % 2 == 0) for index, schema in enumerate(SCHEMAS)]
CHOICES = {"all": FUNCTIONS, **{each.name: [each] for each in FUNCTIONS}}
CONTENT = json.dumps({"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]})
SPELLINGS: dict[str, Callable[[str], str | None]] = {"text": lambda _: None, "tokens": lambda mark: mark}


def grammars(form: ToolFormat, functions: list[Function], *, only_one: bool) -> list[str]:
    """Return the texts of all grammars of a format for some functions."""
    return [
        form.forced(functions, only_one=only_one),
        form.optional(functions, only_one=only_one),
        form.or_content(functions, CONTENT, only_one=only_one),
        form.content(CONTENT) or "",
    ]


def checksums(name: str) -> dict[str, str]:
    """Return the checksums of the grammars of a format, by the functions and the spelling of marks."""
    found = {}
    for spelling, token_name in SPELLINGS.items():
        form = FORMS[name](token_name)
        for choice, chosen in CHOICES.items():
            texts = [text for only_one in (False, True) for text in grammars(form, chosen, only_one=only_one)]
            digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
            found[f"{name} {choice} {spelling}"] = digest[:16]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{key}: {digest}\n" for name in FORMS for key, digest in checksums(name).items())
