"""GET /openapi.json: what the routes take and give, in OpenAPI 3.1, made of the very types that check and spell it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic.json_schema import models_json_schema

from octavo import __version__
from octavo.server.access.auth import OPEN_PATHS
from octavo.server.api import tgi, tokenizing
from octavo.server.api.anthropic import messages
from octavo.server.api.openai import embeddings, responses
from octavo.server.api.openai import replies as openai_responses
from octavo.server.api.openai import requests as openai_requests
from octavo.server.api.openapi_schemas import MORE, OWN_SCHEMAS, REF

if TYPE_CHECKING:
    from pydantic import BaseModel

    from octavo.server.service import Service


@dataclass(frozen=True, slots=True)
class _Route:
    """One route. answer: a schema, or the type that is spelled. streams: it may answer with server-sent events."""

    path: str
    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    streams: bool = False
    family: str = "OpenAI"
    content_type: str = "application/json"


_ROUTES = (
    _Route(
        "/v1/chat/completions",
        "Answer a conversation.",
        openai_requests.ChatCompletionRequest,
        openai_responses.ChatCompletion,
        streams=True,
    ),
    _Route(
        "/v1/completions",
        "Continue prompts.",
        openai_requests.CompletionRequest,
        openai_responses.Completion,
        streams=True,
    ),
    _Route(
        "/v1/responses",
        "Answer a conversation; nothing is stored.",
        responses.ResponsesRequest,
        responses.ResponseObject,
        streams=True,
    ),
    _Route(
        "/v1/responses/input_tokens",
        "Count the tokens of a conversation.",
        responses.ResponsesRequest,
        responses.InputTokens,
    ),
    _Route("/v1/embeddings", "Turn texts into vectors.", embeddings.EmbeddingRequest, embeddings.EmbeddingList),
    _Route("/v1/models", "List the names that are served.", answer="ModelList"),
    _Route("/v1/models/{model}", "Describe a name that is served.", answer="Model"),
    _Route(
        "/v1/messages",
        "Answer a conversation.",
        messages.MessagesRequest,
        messages.Message,
        streams=True,
        family="Anthropic",
    ),
    _Route(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        messages.CountTokensRequest,
        "TokenCount",
        family="Anthropic",
    ),
    _Route("/generate", "Continue a prompt.", tgi.GenerateRequest, tgi.Generated, family="TGI"),
    _Route("/generate_stream", "Continue a prompt as a stream.", tgi.GenerateRequest, streams=True, family="TGI"),
    _Route("/", "Continue a prompt.", tgi.GenerateRequest, "GeneratedList", streams=True, family="TGI"),
    _Route("/info", "Describe the model and its limits.", answer="Object", family="TGI"),
    _Route("/model_info", "Describe the model to gateways.", answer="Object", family="SGLang"),
    _Route("/get_model_info", "The same under its older name.", answer="Object", family="SGLang"),
    _Route("/server_info", "All that the server was started with.", answer="Object", family="operator"),
    _Route("/get_server_info", "The same under its older name.", answer="Object", family="operator"),
    _Route("/tokenize", "Turn text into token ids.", tokenizing.TokenizeRequest, openai_responses.Tokenized),
    _Route("/detokenize", "Turn token ids into text.", tokenizing.DetokenizeRequest, openai_responses.Detokenized),
    _Route("/health", "Whether this process lives.", family="operator"),
    _Route("/ready", "Whether requests are taken.", family="operator"),
    _Route("/version", "The version of octavo.", answer="Version", family="operator"),
    _Route("/metrics", "Figures for Prometheus.", answer="Text", family="operator", content_type="text/plain"),
    _Route("/openapi.json", "This document.", answer="Object", family="operator"),
)

_STATUSES = {
    400: "Something is wrong with the request, or it has no Host or two; the error says what.",
    401: "A key is needed.",
    403: "The key may not do this, or the page that asks is of an unknown Origin.",
    404: "There is no such model.",
    405: "The route does not take this method; Allow says which.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The body is not sent as application/json.",
    421: "The server does not answer under this Host.",
    422: "Something is wrong with the request; the error says what.",
    429: "A limit is reached; Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The server takes no requests now; Retry-After says when to come back.",
    504: "The request took too long.",
}
_POST_ONLY = {408, 413, 415, 422, 429, 500, 504}
_TGI_ONLY = 422
_OTHER_HOST = 421


def describe(service: Service) -> dict[str, Any]:
    """Return the document, with the limits and the names of one server."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__, "description": f"Serves {service.model_names[0]}."},
        "paths": {route.path: {"post" if route.body else "get": _operation(route)} for route in _ROUTES},
        "components": {"schemas": _schemas(), "securitySchemes": schemes},
    }
    if service.keyring is not None:
        document["security"] = [{name: []} for name in schemes]
    return document


def paths() -> list[str]:
    """Return the routes that are described."""
    return [route.path for route in _ROUTES]


def _operation(route: _Route) -> dict[str, Any]:
    name = route.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_") or "root"
    operation: dict[str, Any] = {"operationId": name, "summary": route.summary, "tags": [route.family]}
    if "{model}" in route.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body is not None:
        content = {"application/json": {"schema": {"$ref": REF + route.body.__name__}}}
        operation["requestBody"] = {"required": True, "content": content}
    answers: dict[str, Any] = {}
    if route.answer is not None:
        name = route.answer if isinstance(route.answer, str) else route.answer.__name__
        answers[route.content_type] = {"schema": {"$ref": REF + name}}
    if route.streams:
        answers["text/event-stream"] = {"schema": {"$ref": REF + "Event"}}
    success: dict[str, Any] = {"description": "The answer."}
    operation["responses"] = {"200": {**success, "content": answers} if answers else success, **_errors(route)}
    if route.family == "operator" and route.answer is None:
        operation["security"] = []
    return operation


def _errors(route: _Route) -> dict[str, Any]:
    name = {"Anthropic": "AnthropicError", "TGI": "TGIError"}.get(route.family, "Error")
    # What stops a request before it reaches a route speaks as OpenAI does.
    either = [{"$ref": REF + name}, {"$ref": REF + "Error"}]
    schema = either[0] if name == "Error" else {"anyOf": either}
    statuses = {status for status in _STATUSES if route.body is not None or status not in _POST_ONLY}
    if route.family != "TGI":
        statuses -= {_TGI_ONLY}
    if route.path in OPEN_PATHS:
        statuses.remove(_OTHER_HOST)
    return {
        str(status): {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}
        for status in sorted(statuses)
    }


@functools.cache  # the loop waits for it, 30 ms
def _schemas() -> dict[str, Any]:
    bodies = {route.body for route in _ROUTES if route.body is not None}
    ordered = sorted(bodies, key=lambda body: body.__name__)
    _, requests = models_json_schema([(body, "validation") for body in ordered], ref_template=REF + "{model}")
    answers = [route.answer for route in _ROUTES if isinstance(route.answer, type)]
    _, structs = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    schemas = {**OWN_SCHEMAS, **structs, **requests["$defs"]}
    for name, (required, properties) in MORE.items():
        schema = schemas[name]
        for field, described in properties.items():
            if field not in schema["properties"]:
                raise KeyError(f"{name} has no field {field}")
            schema["properties"][field] = described if field in required else {"anyOf": [described, {"type": "null"}]}
        schema["required"] = list(required)
    return schemas
