"""How each API spells errors and ends a stream, and that the router's tables hold the words of all APIs."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from octavo.http.apis import ANTHROPIC, APIS, OLLAMA, OPENAI, RESPONSES, TGI, Api, api_below, error_response
from octavo.http.errors import HttpError
from octavo.http.routes import ROUTES
from octavo.router.asked import _PROMPT_FIELDS

ERROR = HttpError(429, "the queue is full", "rate_limit_error", "n", "queue_full")
NAMES = ["responses", "anthropic", "openai", "ollama", "tgi"]


@pytest.mark.parametrize("api", APIS, ids=NAMES)
def test_error_event_is_the_last_of_a_stream(api: Api) -> None:
    events = [event for event in api.event(ERROR).split(b"\n\n") if event]
    assert ERROR.message.encode() in events[0]
    assert api.is_last(events[-1] + (b"\n" if api.lines else b"\n\n"))


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
def test_api_of_a_path_also_without_a_route(path: str, api: Api) -> None:
    assert ROUTES.api(path) is api


def test_error_before_a_route_of_tgi_is_spelled_as_openais() -> None:
    """No route has been reached yet; the OpenAPI document says so."""
    assert api_below("/generate") is OPENAI
    assert ROUTES.api("/generate").response(HttpError(400, "bad")).status_code == 422
    assert error_response(HttpError(400, "bad"), "/generate").status_code == 400


@pytest.mark.parametrize(
    ("path", "challenge"),
    [("/dashboard", "Basic"), ("/router", "Basic"), ("/v1/models", "Bearer"), ("/api/tags", "Bearer")],
)
def test_only_pages_ask_a_browser_for_a_password(path: str, challenge: str) -> None:
    response = error_response(HttpError(401, "no key"), path)
    assert response.headers["WWW-Authenticate"].startswith(challenge)


def test_details_of_an_error_are_only_anthropics() -> None:
    error = HttpError(400, "no threads", details={"unsupported": ["thread"]})
    assert ANTHROPIC.error(error)["error"]["details"] == error.details
    assert all(b"unsupported" not in msgspec.json.encode(api.error(error)) for api in APIS if api is not ANTHROPIC)


@pytest.mark.parametrize("api", APIS, ids=NAMES)
def test_prompt_fields_of_an_api_keep_their_order_among_those_of_all(api: Api) -> None:
    places = [_PROMPT_FIELDS.index(name) for name in api.prompt]
    assert all(one < next_one for one, next_one in pairwise(places))


def test_paths_for_operators() -> None:
    private = ("/metrics", "/server_info", "/get_server_info", "/dashboard/events", "/dashboard/requests/a/b")
    assert all(map(ROUTES.is_for_operators, private))
    public = ("/v1/models", "/dashboard", "/dashboard/main.js", "/dashboard/requests", "/health", "/v1/completions")
    assert not any(map(ROUTES.is_for_operators, public))


def test_only_routes_with_a_body_take_a_place() -> None:
    assert ROUTES.find("/api/show") is not None
    assert [ROUTES.find(path) for path in ("/v1/models", "/api/pull", "/metrics", "/none")] == [None] * 4
