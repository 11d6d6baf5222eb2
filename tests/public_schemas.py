"""Schemas as tools of public projects emit them: pydantic's, zod's (3 by zod-to-json-schema, 4 its own), OpenAPI's.

Each has a matching object; for schemas that octavo refuses, it has the place and the text of the refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
_DRAFT_7, _2020 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"  # zod 4's
_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000)$"
)


@dataclass(frozen=True)
class PublicSchema:
    """A schema. refusal: the end of the error message; empty if the schema is accepted."""

    schema: Schema
    value: Any = None
    refusal: str = ""


def _titled(name: str, kind: str, **rest: Any) -> Schema:
    return {name: {"title": name.replace("_", " ").title(), "type": kind, **rest}}


PYDANTIC: dict[str, PublicSchema] = {
    "pydantic: a person": PublicSchema(
        {
            "properties": _titled("name", "string") | _titled("age", "integer"),
            "required": ["name", "age"],
            "title": "Person",
            "type": "object",
        },
        {"name": "Ann", "age": 30},
    ),
    "pydantic: optional fields with defaults": PublicSchema(
        {
            "description": "A task.",
            "properties": {
                "title": {"description": "What to do", "maxLength": 80, "minLength": 1, "title": "T", "type": "string"},
                "due": {
                    "anyOf": [{"format": "date", "type": "string"}, {"type": "null"}],
                    "default": None,
                    "title": "D",
                },
                "tags": {"default": [], "items": {"type": "string"}, "maxItems": 3, "title": "Tags", "type": "array"},
                "priority": {"default": 1, "maximum": 5, "minimum": 1, "title": "Priority", "type": "integer"},
            },
            "required": ["title"],
            "title": "Task",
            "type": "object",
        },
        {"title": "Buy milk", "due": None, "tags": ["home"], "priority": 2},
    ),
    "pydantic: an order with Decimal": PublicSchema(
        {
            "$defs": {
                "Currency": {"enum": ["EUR", "USD"], "title": "Currency", "type": "string"},
                "Line": {
                    "properties": {
                        **_titled("sku", "string", pattern="^[A-Z]{3}-\\d{4}$"),
                        "price": {
                            "anyOf": [
                                {"type": "number"},
                                {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "type": "string"},
                            ],
                            "title": "Price",
                        },
                        "tax": {
                            "pattern": (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"),
                            "title": "Tax",
                            "type": "string",
                        },
                    },
                    "required": ["sku", "price", "tax"],
                    "title": "Line",
                    "type": "object",
                },
            },
            "properties": {
                "currency": {"$ref": "#/$defs/Currency"},
                "lines": {"items": {"$ref": "#/$defs/Line"}, "maxItems": 2, "title": "Lines", "type": "array"},
            },
            "required": ["currency", "lines"],
            "title": "Order",
            "type": "object",
        },
        {"currency": "EUR", "lines": [{"sku": "ABC-1234", "price": "12.50", "tax": "2.38"}]},
    ),
    "pydantic: a discriminated union": PublicSchema(
        {
            "$defs": {
                kind: {
                    "properties": {
                        "kind": {"const": kind.lower(), "title": "Kind", "type": "string"},
                        **_titled(field, "number", exclusiveMinimum=0, maximum=100, multipleOf=0.5),
                    },
                    "required": ["kind", field],
                    "title": kind,
                    "type": "object",
                }
                for kind, field in (("Circle", "radius"), ("Square", "side"))
            },
            "properties": {
                "shape": {
                    "discriminator": {
                        "mapping": {"circle": "#/$defs/Circle", "square": "#/$defs/Square"},
                        "propertyName": "kind",
                    },
                    "oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
                    "title": "Shape",
                }
            },
            "required": ["shape"],
            "title": "Drawing",
            "type": "object",
        },
        {"shape": {"kind": "circle", "radius": 2.5}},
    ),
    "pydantic: a tree": PublicSchema(
        {
            "$defs": {
                "Node": {
                    "properties": {
                        **_titled("label", "string", maxLength=10),
                        "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
                    },
                    "required": ["label"],
                    "title": "Node",
                    "type": "object",
                }
            },
            "$ref": "#/$defs/Node",
        },
        {"label": "a", "left": {"label": "b", "left": None}},
    ),
    "pydantic: formats and a mapping": PublicSchema(
        {
            "properties": {
                "data": {"format": "binary", "title": "Data", "type": "string"},
                "secret": {"format": "password", "title": "S", "type": "string", "writeOnly": True},
                "path": {"format": "path", "title": "Path", "type": "string"},
                "link": {"format": "uri", "maxLength": 2083, "minLength": 1, "title": "Link", "type": "string"},
                "scores": {"additionalProperties": {"type": "integer"}, "title": "Scores", "type": "object"},
                "pair": {
                    "maxItems": 2,
                    "minItems": 2,
                    "prefixItems": [{"type": "integer"}, {"type": "string"}],
                    "title": "Pair",
                    "type": "array",
                },
            },
            "required": ["data", "secret", "path", "link", "scores", "pair"],
            "title": "Mixed",
            "type": "object",
        },
        {"data": "x", "secret": "y", "path": "/", "link": "https://a.org/", "scores": {"a": 1}, "pair": [1, "b"]},
    ),
    "pydantic: a set": PublicSchema(
        {
            "properties": {
                "tags": {"items": {"type": "string"}, "title": "Tags", "type": "array", "uniqueItems": True}
            },
            "required": ["tags"],
            "title": "Tagged",
            "type": "object",
        },
        refusal='#/properties/tags: the keywords "uniqueItems" are not supported',
    ),
}
ZOD: dict[str, PublicSchema] = {
    "zod 3: a user": PublicSchema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 20},
                "email": {"type": "string", "format": "email"},
                "role": {"type": "string", "enum": ["admin", "user"], "default": "user"},
            },
            "required": ["name", "email"],
            "additionalProperties": False,
            "$schema": _DRAFT_7,
        },
        {"name": "Ann", "email": "ann@example.org"},
    ),
    "zod 3: an optional never": PublicSchema(
        {
            "type": "object",
            "properties": {"id": {"type": "string", "maxLength": 8}, "gone": {"not": {}}},
            "required": ["id"],
            "additionalProperties": False,
            "$schema": _DRAFT_7,
        },
        {"id": "a1"},
    ),
    "zod 3: an intersection": PublicSchema(
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": ["boolean", "null"]}}, "required": ["b"]},
            ],
            "unevaluatedProperties": False,
            "$schema": _DRAFT_7,
        },
        {"a": True, "b": None},
    ),
    "zod 3: a named schema": PublicSchema(
        {
            "$ref": "#/definitions/Answer",
            "definitions": {
                "Answer": {
                    "type": "object",
                    "properties": {
                        "steps": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {
                                    "explanation": {"type": "string", "maxLength": 40},
                                    "output": {"type": "string", "maxLength": 20},
                                },
                                "required": ["explanation", "output"],
                                "additionalProperties": False,
                            },
                            "maxItems": 2,
                        },
                        "final_answer": {"type": "string", "maxLength": 20},
                    },
                    "required": ["steps", "final_answer"],
                    "additionalProperties": False,
                }
            },
            "$schema": _DRAFT_7,
        },
        {"steps": [{"explanation": "2 + 2", "output": "4"}], "final_answer": "4"},
    ),
    "zod 4: an email": PublicSchema(
        {
            "$schema": _2020,
            "type": "object",
            "properties": {
                "email": {"type": "string", "format": "email", "pattern": _EMAIL},
                "id": {"type": "string", "format": "uuid", "pattern": _UUID},
                "token": {"type": "string", "format": "jwt"},
            },
            "required": ["email", "id", "token"],
            "additionalProperties": False,
        },
        {"email": "o.k@example.org", "id": "123e4567-e89b-42d3-a456-426614174000", "token": "a.b.c"},
    ),
    "zod 4: a record": PublicSchema(
        {
            "$schema": _2020,
            "type": "object",
            "properties": {
                "counts": {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {
                        "type": "integer",
                        "minimum": -9007199254740991,
                        "maximum": 9007199254740991,
                    },
                },
                "flags": {
                    "type": "object",
                    "propertyNames": {"type": "string", "enum": ["on", "off"]},
                    "additionalProperties": {"type": "boolean"},
                    "required": ["on", "off"],
                },
            },
            "required": ["counts", "flags"],
            "additionalProperties": False,
        },
        {"counts": {"a": 1}, "flags": {"on": True, "off": False}},
    ),
    "zod 4: a duration": PublicSchema(
        {
            "$schema": _2020,
            "type": "object",
            "properties": {"wait": {"type": "string", "format": "duration", "pattern": _DURATION}},
            "required": ["wait"],
            "additionalProperties": False,
        },
        refusal=f"#/properties/wait: the pattern `{_DURATION}` cannot be used: look-around, including look-ahead and "
        "look-behind, is not supported",
    ),
}
OPENAPI: dict[str, PublicSchema] = {
    "OpenAPI: a pet": PublicSchema(
        {
            "required": ["name", "photoUrls"],
            "type": "object",
            "properties": {
                "id": {"type": "integer", "format": "int64", "example": 10},
                "name": {"type": "string", "example": "doggie"},
                "category": {
                    "type": "object",
                    "properties": {"id": {"type": "integer", "format": "int64"}, "name": {"type": "string"}},
                    "xml": {"name": "category"},
                },
                "photoUrls": {"type": "array", "maxItems": 2, "xml": {"wrapped": True}, "items": {"type": "string"}},
                "status": {"type": "string", "description": "pet status", "enum": ["available", "pending", "sold"]},
            },
            "xml": {"name": "pet"},
        },
        {"id": 10, "name": "doggie", "category": {"name": "Dogs"}, "photoUrls": [], "status": "sold"},
    ),
    "OpenAPI: inheritance by allOf": PublicSchema(
        {
            "allOf": [
                {"$ref": "#/components/schemas/Pet"},
                {
                    "type": "object",
                    "required": ["huntingSkill"],
                    "properties": {"huntingSkill": {"type": "string", "enum": ["clueless", "lazy"]}},
                },
            ],
            "components": {
                "schemas": {
                    "Pet": {
                        "type": "object",
                        "required": ["petType"],
                        "discriminator": {"propertyName": "petType"},
                        "properties": {"petType": {"type": "string", "maxLength": 10}},
                    }
                }
            },
        },
        {"petType": "Cat", "huntingSkill": "lazy"},
    ),
    "OpenAPI: bounds of 3.0": PublicSchema(
        {
            "type": "object",
            "properties": {
                "limit": {"type": "integer", "format": "int32", "minimum": 0, "exclusiveMinimum": True, "maximum": 100},
                "cursor": {"type": "string", "nullable": True, "maxLength": 12, "readOnly": True},
                "since": {"type": "string", "format": "date-time"},
            },
            "required": ["limit", "since"],
            "externalDocs": {"url": "https://example.org"},
        },
        {"limit": 5, "since": "2026-03-01T12:00:00Z"},
    ),
    "OpenAPI: one of the ways": PublicSchema(
        {
            "type": "object",
            "properties": {"phone": {"type": "string", "maxLength": 12}, "mail": {"type": "string", "maxLength": 12}},
            "anyOf": [{"required": ["phone"]}, {"required": ["mail"]}],
        },
        {"mail": "a@b.c"},
    ),
    "OpenAPI: overlapping oneOf": PublicSchema(
        {
            "type": "object",
            "required": ["address"],
            "properties": {
                "address": {
                    "oneOf": [
                        {
                            "type": "object",
                            "required": ["city"],
                            "properties": {"city": {"type": "string", "maxLength": 12}, "zip": {"type": "string"}},
                        },
                        {
                            "type": "object",
                            "required": ["city"],
                            "properties": {"city": {"type": "string", "maxLength": 12}, "street": {"type": "string"}},
                        },
                    ]
                }
            },
        },
        {"address": {"city": "Rome", "zip": "00100"}},
    ),
    "OpenAPI: conditions": PublicSchema(
        {
            "type": "object",
            "properties": {"country": {"type": "string"}, "zip": {"type": "string"}},
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
        },
        refusal='#: the keywords "if", "then" are not supported',
    ),
}
PUBLIC_SCHEMAS = PYDANTIC | ZOD | OPENAPI
SERVED = {name: each for name, each in PUBLIC_SCHEMAS.items() if not each.refusal}
