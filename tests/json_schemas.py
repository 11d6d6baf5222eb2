"""JSON schemas for structured answers: hard ones written by hand, and any number from seeds.

All of them limit lengths, counts and depth, so that an answer ends within a budget of tokens.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Schema = dict[str, Any]
SHORT = {"type": "string", "maxLength": 8}


def _object(properties: Schema, **rest: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False, **rest}


HARD: dict[str, Schema] = {
    "constant": {"const": {"a": [1, None, 'x\n"y" \\ ü狐']}},
    "enum of all types": {"enum": [None, True, -1.5, "", "a b", [], {"k": 1}]},
    "one of no properties": _object({}),
    "optional properties": _object(
        {"a": SHORT, "b": {"type": "integer", "minimum": 0, "maximum": 9}, "c": {"type": "null"}}
    ),
    "required in another order": _object({"a": SHORT, "b": SHORT, "c": SHORT}, required=["c", "a"]),
    "names that need escapes": _object(
        {'"': SHORT, "\\": SHORT, "\n": SHORT, "ü": SHORT}, required=['"', "\\", "\n", "ü"]
    ),
    "integers in a range": _object(
        {
            "x": {"type": "integer", "minimum": -17, "maximum": 1234},
            "y": {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 101},
        },
        required=["x", "y"],
    ),
    "numbers in a range": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "formats": _object(
        {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
            "at": {"type": "string", "format": "ipv4"},
        },
        required=["day", "id", "at"],
    ),
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, SHORT, {"const": 7}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "a matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {"type": "integer", "minimum": 0, "maximum": 1},
        },
    },
    "any of": {
        "anyOf": [
            _object({"kind": {"const": "a"}, "n": {"enum": [1, 2]}}, required=["kind", "n"]),
            _object({"kind": {"const": "b"}}, required=["kind"]),
        ]
    },
    "a list by reference": {
        "$defs": {
            "node": _object(
                {"value": {"enum": [0, 1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
                required=["value", "next"],
            ),
            "leaf": _object({"value": {"enum": [0, 1]}}, required=["value"]),
        },
        "$ref": "#/$defs/node",
    },
    "several types": {"type": ["boolean", "null"]},
    "empty array only": {"type": "array", "maxItems": 0},
    "string of a given length": {"type": "string", "minLength": 5, "maxLength": 5},
    "many properties": _object(
        {f"p{i}": {"type": "boolean"} for i in range(30)}, required=[f"p{i}" for i in range(30)]
    ),
    "a large enum": {"enum": [f"value {i:04}" for i in range(1000)]},
}
_deep: Schema = {"type": "boolean"}
for _level in range(12):
    _deep = _object({"d": _deep}, required=["d"])
HARD["deep"] = _deep


def generate(seed: int) -> Schema:
    """Return the schema of a seed: objects and arrays to a depth of three, with bounded values."""
    return _generate(random.Random(seed), 3)


def _generate(rng: random.Random, depth: int) -> Schema:
    kinds = list(_MAKERS) if depth else list(_PLAIN)
    kind = rng.choice(kinds + 3 * ["object"] + 2 * ["array"] if depth else kinds)
    return _MAKERS[kind](rng, depth)


def _make_object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "age", "tags", "is_open", "id", "x", "größe", "the long name"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.6]
    return _object({name: _generate(rng, depth - 1) for name in names}, required=required)


def _make_array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _generate(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _make_number(kind: str) -> Callable[[random.Random, int], Schema]:
    def make(rng: random.Random, _depth: int) -> Schema:
        low = rng.randint(-100, 100)
        steps = {"multipleOf": 0.25} if kind == "number" else {}  # digits could continue without end otherwise
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 500), **steps}

    return make


_PLAIN: dict[str, Callable[[random.Random, int], Schema]] = {
    "string": lambda rng, _: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)},
    "integer": _make_number("integer"),
    "number": _make_number("number"),
    "boolean": lambda _rng, _: {"type": "boolean"},
    "null": lambda _rng, _: {"type": "null"},
    "enum": lambda rng, _: {"enum": rng.sample(["red", "green", "a b", 1, 2.5, None, True], rng.randint(1, 4))},
    "pattern": lambda rng, _: {"type": "string", "pattern": rng.choice(_PATTERNS)},
}
_PATTERNS = ["^[a-z]{1,6}$", "^(ab|cd){1,3}$", "^[0-9]{3}-[0-9]{2}$"]
_MAKERS = {
    **_PLAIN,
    "object": _make_object,
    "array": _make_array,
    "any of": lambda rng, depth: {"anyOf": [_generate(rng, depth - 1) for _ in range(2)]},
}
