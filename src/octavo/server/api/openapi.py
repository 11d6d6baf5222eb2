"""The OpenAPI document."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Literal, NotRequired

import msgspec
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from octavo import __version__
from octavo.http.apis import ANTHROPIC, OLLAMA, TGI
from octavo.http.auth import OPEN_PATHS
from octavo.server.endpoints import endpoint, find_endpoint

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.http.routes import Route, Routes
    from octavo.server.endpoints import Endpoint
    from octavo.server.service import Service

_REF = "#/components/schemas/"
_Object = dict[str, Any]
Event = TypedDict("Event", {"data": str, "event": NotRequired[str]})
ErrorObject = TypedDict("ErrorObject", {"message": str, "type": str, "param": str | None, "code": str | None})
Error = TypedDict("Error", {"error": ErrorObject})
AnthropicErrorObject = TypedDict("AnthropicErrorObject", {"type": str, "message": str})
TgiError = TypedDict("TgiError", {"error": str, "error_type": str})
OllamaError = TypedDict("OllamaError", {"error": str})
AnthropicError = TypedDict("AnthropicError", {"type": Literal["error"], "error": AnthropicErrorObject})

_PARAMETER, _CONVERTOR = re.compile(r"{(\w+)"), re.compile(r":\w+}")  # in Starlette's paths
_OLDER = "The same route under its older name."
_ERRORS = {ANTHROPIC: AnthropicError, TGI: TgiError, OLLAMA: OllamaError}  # other APIs have OpenAI's form of errors

_STATUSES = {
    400: "The request is invalid, or it does not have exactly one Host header; see the error.",
    401: "A valid API key is required.",
    403: "The key does not allow this, or the Origin of the calling page is not allowed.",
    404: "The model does not exist.",
    405: "The route does not support this method; Allow lists its methods.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The body was not sent as application/json.",
    421: "This Host is not allowed.",
    422: "The request is invalid; see the error.",
    429: "A limit is reached; retry after Retry-After seconds.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The server accepts no requests now; retry after Retry-After seconds.",
    504: "The request took too long.",
}
_POST_ONLY = {408, 413, 415, 422, 429, 500, 504}
_TGI_ONLY = 422
_OTHER_HOST = 421


@endpoint(answer=_Object)
async def openapi(service: Service, http_request: Request) -> Response:
    """Return this document."""
    return JSONResponse(describe(service, http_request.app.state.routes))


def describe(service: Service, routes: Routes) -> _Object:
    """Make the document."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schemas, components = _schemas(routes)
    document: _Object = {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__, "description": f"Serves {service.model_names[0]}."},
        "paths": {
            _CONVERTOR.sub("}", path): {route.methods[0].lower(): _operation(route, path, schemas)}
            for route in routes
            if route.is_described
            for path in route.paths
        },
        "components": {"schemas": components, "securitySchemes": schemes},
    }
    if service.keyring is not None:
        document["security"] = [{name: []} for name in schemes]
    return document


def _operation(route: Route, path: str, schemas: dict[Any, _Object]) -> _Object:
    declared = find_endpoint(route)
    parameter = {"in": "path", "required": True, "schema": {"type": "string"}}
    name = re.sub(r"[/.]", "_", re.sub(r"[{}]", "", _CONVERTOR.sub("}", path)).strip("/")) or "root"
    summary = declared.summary if path == route.path else _OLDER
    operation: _Object = {"operationId": name, "summary": summary, "tags": [route.api.name]}
    parameters = [{"name": each, **parameter} for each in _PARAMETER.findall(path)]
    if declared.query is not None:
        fields = declared.query.model_json_schema()["properties"]
        parameters += [{"name": each, "in": "query", "schema": schema} for each, schema in fields.items()]
    if parameters:
        operation["parameters"] = parameters
    if declared.body is not None:
        operation["requestBody"] = {"required": True, **_content("application/json", schemas[declared.body])}
    answers: _Object = {}
    if declared.answer is not None:
        answers["text/plain" if declared.answer is str else "application/json"] = {"schema": schemas[declared.answer]}
    if declared.may_be_text:
        answers["text/plain"] = {"schema": {"type": "string"}}
    if declared.is_streamed and route.api.lines:
        answers["application/x-ndjson"] = answers["application/json"]
    elif declared.is_streamed:
        answers["text/event-stream"] = {"schema": schemas[Event]}
    success: _Object = {"description": "The answer."}
    operation["responses"] = {"200": {**success, "content": answers} if answers else success}
    operation["responses"] |= _errors(route, declared, schemas)
    if path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _errors(route: Route, declared: Endpoint, schemas: dict[Any, _Object]) -> _Object:
    # Errors that occur before the route is known have OpenAI's form.
    kinds = dict.fromkeys((_ERRORS.get(route.api, Error), Error))
    either = [schemas[kind] for kind in kinds]
    statuses = {status for status in _STATUSES if declared.body is not None or status not in _POST_ONLY}
    if route.api is not TGI:
        statuses -= {_TGI_ONLY}
    if route.path in OPEN_PATHS:
        statuses.remove(_OTHER_HOST)
    content = _content("application/json", either[0] if len(either) == 1 else {"anyOf": either})
    return {str(status): {"description": _STATUSES[status], **content} for status in sorted(statuses)}


def _content(media_type: str, schema: _Object) -> _Object:
    return {"content": {media_type: {"schema": schema}}}


@functools.cache  # slow, and blocks the event loop
def _schemas(routes: Routes) -> tuple[dict[Any, _Object], _Object]:
    endpoints = [find_endpoint(route) for route in routes if route.is_described]
    bodies = sorted({each.body for each in endpoints if each.body is not None}, key=lambda body: body.__name__)
    inputs, requests = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    of_endpoints = (each.answer for each in endpoints if each.answer)
    answers = list(dict.fromkeys([*of_endpoints, *_ERRORS.values(), Error, Event]))
    outputs, described = msgspec.json.schema_components(answers, ref_template=_REF + "{name}")
    assert not requests["$defs"].keys() & described.keys(), "two types have the same name"
    of_bodies = {body: inputs[body, "validation"] for body in bodies}
    return {**of_bodies, **dict(zip(answers, outputs, strict=True))}, {**described, **requests["$defs"]}
