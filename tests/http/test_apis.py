"""How each API spells errors and ends a stream. The router's tables contain the field names of all APIs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from octavo.http.apis import ANTHROPIC, APIS, OLLAMA, OPENAI, RESPONSES, TGI, Api, api_below, error_response
from octavo.http.errors import HttpError
from octavo.http.routes import ROUTES
from octavo.router.request_summary import _PROMPT_FIELDS

ERROR = HttpError(429, "the queue is full", "rate_limit_error", "n", "queue_full")
NAMES = ["responses", "anthropic", "openai", "ollama", "tgi"]


@pytest.mark.parametrize("api", APIS, ids=NAMES)
def test_error_event_is_last_of_stream(api: Api) -> None:
    events = [event for event in api.event(ERROR).split(b"\n\n") if event]
    assert ERROR.message.encode() in events[0]
    assert api.is_last(events[-1] + (b"\n" if api.lines else b"\n\n"))


OPENAI_OBJECT = {"message": "the queue is full", "type": "rate_limit_error", "param": "n", "code": "queue_full"}
RESPONSES_EVENT = {"type": "error", "code": "queue_full", "message": "the queue is full", "param": "n"}


@pytest.mark.parametrize(
    ("api", "first_line", "body"),
    [
        (OPENAI, b"", {"error": OPENAI_OBJECT}),
        (RESPONSES, b"event: error\n", {**RESPONSES_EVENT, "sequence_number": 0}),
        (
            ANTHROPIC,
            b"event: error\n",
            {"type": "error", "error": {"type": "rate_limit_error", "message": "the queue is full"}},
        ),
        (TGI, b"", {"error": "the queue is full", "error_type": "overloaded"}),
    ],
    ids=["openai", "responses", "anthropic", "tgi"],
)
def test_stream_error_event_has_form_of_its_api(api: Api, first_line: bytes, body: dict[str, Any]) -> None:
    event, _, rest = api.event(ERROR).partition(b"\n\n")
    assert event.startswith(first_line + b"data: ")
    assert msgspec.json.decode(event.removeprefix(first_line + b"data: ")) == body
    assert rest == (b"data: [DONE]\n\n" if api is OPENAI else b"")


def test_ollama_stream_error_is_one_json_line() -> None:
    assert OLLAMA.event(ERROR) == b'{"error":"the queue is full"}\n'


def test_responses_error_without_code_uses_its_type() -> None:
    assert b'"code":"server_error"' in RESPONSES.event(HttpError(500, "failed", "server_error"))


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (OPENAI, b'data: {"text":"data: [DONE]"}\n\n'),
        (RESPONSES, b"event: response.created\ndata: {}\n\n"),
        (ANTHROPIC, b"event: message_delta\ndata: {}\n\n"),
        (TGI, b'data: {"details":null}\n\n'),
        (TGI, b"no JSON"),
        (OLLAMA, b'{"done":false}\n'),
    ],
)
def test_ordinary_events_do_not_end_stream(api: Api, event: bytes) -> None:
    assert not api.is_last(event)


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/responses", RESPONSES),
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/batches", ANTHROPIC),
        ("/generate", TGI),
        ("/", TGI),
        ("/api/unknown", OLLAMA),
        ("/v1/unknown", OPENAI),
        ("/generate/unknown", OPENAI),
    ],
)
def test_api_is_found_by_path_even_without_route(path: str, api: Api) -> None:
    assert ROUTES.api(path) is api


def test_tgi_error_before_routing_has_openai_form() -> None:
    """No route has been reached yet, so the error has OpenAI's form, as the OpenAPI document says."""
    assert api_below("/generate") is OPENAI
    assert ROUTES.api("/generate").response(HttpError(400, "bad")).status_code == 422
    assert error_response(HttpError(400, "bad"), "/generate").status_code == 400


@pytest.mark.parametrize(
    ("path", "challenge"),
    [("/dashboard", "Basic"), ("/router", "Basic"), ("/v1/models", "Bearer"), ("/api/tags", "Bearer")],
)
def test_only_pages_request_basic_authentication(path: str, challenge: str) -> None:
    response = error_response(HttpError(401, "no key"), path)
    assert response.headers["WWW-Authenticate"].startswith(challenge)


def test_only_missing_key_gets_www_authenticate_header() -> None:
    assert "WWW-Authenticate" not in error_response(HttpError(403, "not allowed"), "/dashboard").headers


@pytest.mark.parametrize(
    ("api", "field", "kinds"),
    [
        (
            ANTHROPIC,
            "type",
            {
                400: "invalid_request_error",
                401: "authentication_error",
                403: "permission_error",
                404: "not_found_error",
                413: "request_too_large",
                429: "rate_limit_error",
                500: "api_error",
                503: "overloaded_error",
                504: "timeout_error",
            },
        ),
        (TGI, "error_type", {400: "validation", 413: "validation", 429: "overloaded", 503: "generation"}),
    ],
    ids=["anthropic", "tgi"],
)
def test_error_type_follows_status(api: Api, field: str, kinds: dict[int, str]) -> None:
    bodies = {status: api.error(HttpError(status, "")) for status in kinds}
    assert {
        status: body["error"][field] if api is ANTHROPIC else body[field] for status, body in bodies.items()
    } == kinds


def test_only_ollama_allows_any_media_type_and_streams_lines() -> None:
    assert [api for api in APIS if api.any_type] == [api for api in APIS if api.lines] == [OLLAMA]


def test_only_anthropic_errors_have_details() -> None:
    error = HttpError(400, "no threads", details={"unsupported": ["thread"]})
    assert ANTHROPIC.error(error)["error"]["details"] == error.details
    assert all(b"unsupported" not in msgspec.json.encode(api.error(error)) for api in APIS if api is not ANTHROPIC)


@pytest.mark.parametrize("api", APIS, ids=NAMES)
def test_prompt_fields_of_api_keep_order_in_router_list(api: Api) -> None:
    places = [_PROMPT_FIELDS.index(name) for name in api.prompt]
    assert all(one < next_one for one, next_one in pairwise(places))


def test_operator_paths_are_separated_from_public_ones() -> None:
    private = ("/metrics", "/server_info", "/get_server_info", "/dashboard/events", "/dashboard/requests/a/b")
    assert all(map(ROUTES.is_for_operators, private))
    public = ("/v1/models", "/dashboard", "/dashboard/main.js", "/dashboard/requests", "/health", "/v1/completions")
    assert not any(map(ROUTES.is_for_operators, public))


def test_find_returns_only_routes_with_work() -> None:
    assert ROUTES.find("/api/show") is not None
    assert [ROUTES.find(path) for path in ("/v1/models", "/api/pull", "/metrics", "/none")] == [None] * 4
