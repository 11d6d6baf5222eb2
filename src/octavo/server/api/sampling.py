"""Build `SamplingParams` from a request's fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from pydantic import BaseModel

    from octavo.server.api.openai.requests import SamplingFields

_STRUCTURES = {field.name for field in fields(StructuredOutputsParams)}
_SCHEMA_KEYS = ("schema", "value")  # llama.cpp's key, huggingface_hub's key
_ANY_SEED = -1  # random, as in vLLM, llama.cpp and Ollama
_NAMES = [field.name for field in fields(SamplingParams)]


def sampling_params(request: BaseModel, defaults: SamplingParams, **given: Any) -> SamplingParams:
    """Build `SamplingParams` from the equally named fields of a request.

    defaults: Values for missing and null fields. given: Values that override the request's fields.
    """
    known = type(request).model_fields
    named = {name: value for name in _NAMES if name in known and (value := getattr(request, name)) is not None}
    if named.get("seed") == _ANY_SEED:
        del named["seed"]
    if "logit_bias" in named:
        named["logit_bias"] = read_logit_bias(named["logit_bias"])
    return replace(defaults, **{**named, **given})


def read_structure(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the answer's required structure, or None."""
    wanted, fields = read_response_format(request.response_format), request.structured_outputs
    if fields is None:
        return wanted
    if wanted is not None:
        raise RequestError("give response_format or structured_outputs, not both", parameter="response_format")
    if unknown := fields.keys() - _STRUCTURES:
        name = f"structured_outputs.{min(unknown)}"[:100]
        raise RequestError(f"{name} is not supported by this server", parameter="structured_outputs")
    return StructuredOutputsParams(**fields)


def token_limit(given: int | None, default: int | None) -> int | None:
    """Return the maximum number of output tokens, or None for no limit.

    given: The client's limit. -1 means no limit, None means `default`.
    """
    if given == -1:
        return None
    return default if given is None else given


def read_response_format(given: Any, parameter: str = "response_format") -> StructuredOutputsParams | None:
    """Return the structure in response_format, or None for plain text."""
    if given is not None and not isinstance(given, dict):
        raise RequestError(f"{parameter} must be an object with a type", parameter=parameter)
    if given is None or given.get("type") == "text":
        return None
    kind = given.get("type")
    if kind == "json_object":
        where = next((key for key in _SCHEMA_KEYS if given.get(key) not in (None, {})), None)
        if where is None:
            return StructuredOutputsParams(json_object=True)
        schema = given[where]
    elif kind == "json_schema":
        described = given.get("json_schema")
        where, schema = "json_schema.schema", described.get("schema") if isinstance(described, dict) else None
    else:
        message = f"{parameter}.type must be text, json_object or json_schema, got {kind!r:.60}"
        raise RequestError(message, parameter=parameter)
    if not isinstance(schema, dict):
        raise RequestError(f"{parameter}.{where} must be a JSON schema", parameter=parameter)
    try:
        return StructuredOutputsParams(json=schema)
    except RequestError as error:
        raise RequestError(str(error), parameter=parameter) from None


def read_logit_bias(biases: dict[str, float] | None) -> dict[int, float] | None:
    """Convert keys to token ids."""
    if not biases:
        return None
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise RequestError(f"logit_bias: {key[:20]!r} is not a token id", parameter="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
