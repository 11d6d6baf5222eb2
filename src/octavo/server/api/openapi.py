"""GET /openapi.json: what the routes take and give, in OpenAPI 3.1, made of the very types that check and spell it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired

import msgspec
from pydantic.json_schema import models_json_schema
from typing_extensions import TypedDict

from octavo import __version__
from octavo.http.auth import OPEN_PATHS
from octavo.server.api.anthropic.messages import CountTokensRequest, Message, MessagesRequest
from octavo.server.api.ollama.replies import Answer, Vector, Vectors
from octavo.server.api.ollama.requests import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    PromptRequest,
    ShowRequest,
)
from octavo.server.api.openai import replies
from octavo.server.api.openai.embeddings import EmbeddingList, EmbeddingRequest
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest
from octavo.server.api.tgi import Generated, GenerateRequest
from octavo.server.api.tokenizing import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from octavo.server.service import Service

_REF = "#/components/schemas/"
_Object = dict[str, Any]
# Answers that are spelled without a type of their own.
Model = TypedDict("Model", {"id": str, "object": Literal["model"], "created": int, "max_model_len": int})
ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[Model]})
TokenCount = TypedDict("TokenCount", {"input_tokens": int})
Event = TypedDict("Event", {"data": str, "event": NotRequired[str]})
Version = TypedDict("Version", {"version": str})
ErrorObject = TypedDict("ErrorObject", {"message": str, "type": str, "param": str | None, "code": str | None})
Error = TypedDict("Error", {"error": ErrorObject})
AnthropicErrorObject = TypedDict("AnthropicErrorObject", {"type": str, "message": str})
TgiError = TypedDict("TgiError", {"error": str, "error_type": str})
OllamaError = TypedDict("OllamaError", {"error": str})
OllamaModels = TypedDict("OllamaModels", {"models": list[dict[str, Any]]})
AnthropicError = TypedDict("AnthropicError", {"type": Literal["error"], "error": AnthropicErrorObject})


@dataclass(frozen=True, slots=True)
class _Route:
    """One route. answer: the type that is spelled. streams: it may answer with events, of Ollama's with lines."""

    path: str
    summary: str
    answer: Any = None
    body: type[BaseModel] | None = None
    family: str = "OpenAI"
    streams: bool = False


_CONVERSATION = "Answer a conversation."
_UNSTORED = f"{_CONVERSATION} Nothing is stored."
_COUNT = "Count the tokens of a conversation."
_PROMPT = "Continue a prompt."
_ROUTES = (
    _Route("/v1/chat/completions", _CONVERSATION, replies.ChatCompletion, ChatCompletionRequest, streams=True),
    _Route("/v1/completions", "Continue prompts.", replies.Completion, CompletionRequest, streams=True),
    _Route("/v1/responses", _UNSTORED, replies.ResponseObject, ResponsesRequest, streams=True),
    _Route("/v1/responses/input_tokens", _COUNT, replies.InputTokens, ResponsesRequest),
    _Route("/v1/embeddings", "Turn texts into vectors.", EmbeddingList, EmbeddingRequest),
    _Route("/v1/models", "List the names that are served.", ModelList),
    _Route("/v1/models/{model}", "Describe a name that is served.", Model),
    _Route("/v1/messages", _CONVERSATION, Message, MessagesRequest, "Anthropic", streams=True),
    _Route("/v1/messages/count_tokens", _COUNT, TokenCount, CountTokensRequest, "Anthropic"),
    _Route("/generate", _PROMPT, Generated, GenerateRequest, "TGI"),
    _Route("/generate_stream", _PROMPT, None, GenerateRequest, "TGI", streams=True),
    _Route("/", _PROMPT, list[Generated], GenerateRequest, "TGI", streams=True),
    _Route("/info", "Describe the model and its limits.", _Object, family="TGI"),
    _Route("/api/chat", _CONVERSATION, Answer, ChatRequest, "Ollama", streams=True),
    _Route("/api/generate", "Answer a prompt.", Answer, PromptRequest, "Ollama", streams=True),
    _Route("/api/embed", "Turn texts into vectors.", Vectors, EmbedRequest, "Ollama"),
    _Route("/api/embeddings", "Turn a text into a vector.", Vector, EmbeddingsRequest, "Ollama"),
    _Route("/api/show", "Describe a model.", _Object, ShowRequest, "Ollama"),
    _Route("/api/tags", "List the models.", OllamaModels, family="Ollama"),
    _Route("/api/ps", "List the models that are loaded.", OllamaModels, family="Ollama"),
    _Route("/api/version", "The version of Ollama that this is like.", Version, family="Ollama"),
    _Route("/model_info", "Describe the model to gateways.", _Object, family="SGLang"),
    _Route("/get_model_info", "The same under its older name.", _Object, family="SGLang"),
    _Route("/server_info", "All that the server was started with.", _Object, family="operator"),
    _Route("/get_server_info", "The same under its older name.", _Object, family="operator"),
    _Route("/tokenize", "Turn text into token ids.", replies.Tokenized, TokenizeRequest),
    _Route("/detokenize", "Turn token ids into text.", replies.Detokenized, DetokenizeRequest),
    _Route("/health", "Whether this process lives.", family="operator"),
    _Route("/ready", "Whether requests are taken.", family="operator"),
    _Route("/version", "The version of octavo.", Version, family="operator"),
    _Route("/metrics", "Figures for Prometheus.", str, family="operator"),
    _Route("/openapi.json", "This document.", _Object, family="operator"),
)
_ERRORS = {"Anthropic": AnthropicError, "TGI": TgiError, "Ollama": OllamaError}  # of a family; the others' is OpenAI's

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
    schemas, components = _schemas()
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__, "description": f"Serves {service.model_names[0]}."},
        "paths": {route.path: {"post" if route.body else "get": _operation(route, schemas)} for route in _ROUTES},
        "components": {"schemas": components, "securitySchemes": schemes},
    }
    if service.keyring is not None:
        document["security"] = [{name: []} for name in schemes]
    return document


def _operation(route: _Route, schemas: dict[Any, _Object]) -> _Object:
    name = route.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_") or "root"
    operation: _Object = {"operationId": name, "summary": route.summary, "tags": [route.family]}
    if "{model}" in route.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content("application/json", schemas[route.body])}
    answers: _Object = {}
    if route.answer is not None:
        answers["text/plain" if route.answer is str else "application/json"] = {"schema": schemas[route.answer]}
    if route.streams and route.family == "Ollama":
        answers["application/x-ndjson"] = answers["application/json"]
    elif route.streams:
        answers["text/event-stream"] = {"schema": schemas[Event]}
    success: _Object = {"description": "The answer."}
    operation["responses"] = {"200": {**success, "content": answers} if answers else success, **_errors(route, schemas)}
    if route.family == "operator" and route.answer is None:
        operation["security"] = []
    return operation


def _errors(route: _Route, schemas: dict[Any, _Object]) -> _Object:
    # What stops a request before it reaches a route speaks as OpenAI does.
    kinds = dict.fromkeys((_ERRORS.get(route.family, Error), Error))
    either = [schemas[kind] for kind in kinds]
    statuses = {status for status in _STATUSES if route.body is not None or status not in _POST_ONLY}
    if route.family != "TGI":
        statuses -= {_TGI_ONLY}
    if route.path in OPEN_PATHS:
        statuses.remove(_OTHER_HOST)
    content = _content("application/json", either[0] if len(either) == 1 else {"anyOf": either})
    return {str(status): {"description": _STATUSES[status], **content} for status in sorted(statuses)}


def _content(media_type: str, schema: _Object) -> _Object:
    return {"content": {media_type: {"schema": schema}}}


@functools.cache  # the loop waits for it
def _schemas() -> tuple[dict[Any, _Object], _Object]:
    """Return the schema of each type that a route takes or gives, and those that these refer to, by name."""
    bodies = sorted({route.body for route in _ROUTES if route.body is not None}, key=lambda body: body.__name__)
    inputs, requests = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    answers = list(
        dict.fromkeys([*(route.answer for route in _ROUTES if route.answer), *_ERRORS.values(), Error, Event])
    )
    outputs, described = msgspec.json.schema_components(answers, ref_template=_REF + "{name}")
    assert not requests["$defs"].keys() & described.keys(), "two types have one name"
    of_bodies = {body: inputs[body, "validation"] for body in bodies}
    return {**of_bodies, **dict(zip(answers, outputs, strict=True))}, {**described, **requests["$defs"]}
