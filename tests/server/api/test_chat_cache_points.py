"""Chats of all APIs tell the core where to save recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from running import run_server

from octavo.engine.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

    from octavo.data.request import Request

TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor -%}
{%- if add_generation_prompt %}<assistant><think>{% endif -%}
"""
PREFIXES = "<system>Be brief.<user>", "<system>Be brief.<user>Hello<assistant>"
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [SYSTEM, USER], "max_tokens": 2},
    "/v1/responses": {"instructions": "Be brief.", "input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"model": "fake", "system": "Be brief.", "messages": [USER], "max_tokens": 2},
    "/api/chat": {"model": "fake", "messages": [SYSTEM, USER], "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "system": "Be brief.", "prompt": "Hello", "options": {"num_predict": 2}},
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    options = {"chat_template": ChatTemplate(TEMPLATE), "model_info": {"has_recurrent_layers": True}}
    with run_server(engine_options=options) as running:
        yield running


@pytest.fixture
def added(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    scheduler, requests = running.engine.core.scheduler, list[Any]()
    add = scheduler.add_request

    def note(request: Request) -> None:
        requests.append(request)
        add(request)

    monkeypatch.setattr(scheduler, "add_request", note)
    return requests


@pytest.mark.parametrize("route", CHATS)
def test_every_chat_names_its_cache_points(running: Running, added: list[Request], route: str) -> None:
    with running.http() as http:
        response = http.post(route, json=CHATS[route])
    assert response.status_code == 200, response.text
    [request] = added
    assert request.cache_points == tuple(len(prefix) - 1 for prefix in PREFIXES)


def test_truncated_chats_and_completions_have_no_cache_points(running: Running, added: list[Request]) -> None:
    with running.http() as http:
        http.post("/v1/chat/completions", json={**CHATS["/v1/chat/completions"], "truncate_prompt_tokens": 9})
        http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    assert [request.cache_points for request in added] == [(), ()]
