"""A new API route needs one file and one line: server, OpenAPI document, limits, audit log and router follow."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from router.routing import run_router
from running import run_server, wait_until

import octavo.router.app
import octavo.server.api
import octavo.server.serving
from octavo.http.apis import TGI
from octavo.http.routes import ROUTES, Route, Routes
from octavo.http.tenants import Tenant, add_key
from octavo.server.endpoints import find_endpoint

if TYPE_CHECKING:
    from pathlib import Path

# The one file.
SHOUT = '''"""POST /v1/shout."""

from msgspec import Struct
from octavo.runtime.ids import new_id
from octavo.sampling_params import SamplingParams
from octavo.server.answers.answering import answer_complete
from octavo.server.answers.jobs import Job
from octavo.server.answers.usage import Usage
from octavo.server.api.openai.requests import Body
from octavo.server.endpoints import endpoint


class ShoutRequest(Body):
    """POST /v1/shout."""

    prompt: str
    max_tokens: int = 4


class Shout(Struct):
    """A continuation in capitals."""

    text: str
    usage: Usage


class ShoutReply:
    """Spells an output in capitals."""

    def whole(self, outputs, usage):
        return Shout(outputs[0].outputs[0].text.upper(), usage)


@endpoint(body=ShoutRequest, answer=Shout)
async def shout(service, http_request, request):
    """Continue a prompt in capitals."""
    with service.enter(http_request, 1) as place:
        job = Job(
            request_id=f"shout-{new_id()}",
            model=service.model_names[0],
            prompts=[request.prompt],
            params=SamplingParams(max_tokens=request.max_tokens),
            place=place,
            deadline=http_request.state.deadline,
        )
        return await answer_complete(service, http_request, job, ShoutReply())
'''
PATH = "/v1/shout"
# The one line.
ROUTE = Route(PATH, "shout:shout", TGI, work="answer")
BODY = {"prompt": "a", "max_tokens": 8}


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(SHOUT, encoding="utf-8")
    monkeypatch.setattr(octavo.server.api, "__path__", [*octavo.server.api.__path__, str(tmp_path)])
    routes = Routes(*ROUTES, ROUTE)
    for module in (octavo.server.serving, octavo.router.app):
        monkeypatch.setattr(module, "create_app", partial(module.create_app, routes=routes))
    monkeypatch.delitem(sys.modules, "octavo.server.api.shout", raising=False)


def test_new_route_is_served_and_described() -> None:
    with run_server() as running, running.http() as http:
        answer = http.post(PATH, json=BODY)
        document = http.get("/openapi.json").json()
        assert http.get(PATH).status_code == 405
    assert answer.status_code == 200
    assert (len(answer.json()["text"]), answer.json()["usage"]["completion_tokens"]) == (8, 8)
    operation = document["paths"][PATH]["post"]
    assert operation["summary"] == "Continue a prompt in capitals."
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ShoutRequest")
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Shout")
    assert {"prompt", "max_tokens"} == document["components"]["schemas"]["ShoutRequest"]["properties"].keys()


def test_new_route_is_checked_limited_counted_and_audited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = add_key(path := tmp_path / "keys.toml", Tenant(name="alice", tokens_per_minute=4))
    caplog.set_level(logging.INFO, logger="octavo.audit")
    with run_server(api_keys_file=path, log_level="info") as running, running.http() as http:
        assert http.post(PATH, json=BODY).status_code == 401
        http.headers["x-api-key"] = key
        wrong = http.post(PATH, json={**BODY, "max_tokens": "many"})
        assert http.post(PATH, json=BODY).status_code == 200
        refused = http.post(PATH, json=BODY)
        figures, _ = running.server._service.metrics.text("")
        lines = wait_until(lambda: len(found := audited(caplog)) == 4 and found, "all are logged")
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation"), "spelled as its API spells errors"
    assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
    assert f'handler="{PATH}",method="POST",status="200"'.encode() in figures
    (answered,) = (line for line in lines if line["status"] == 200)
    assert (answered["path"], answered["key"], answered["completion_tokens"]) == (PATH, "alice", 8)


def test_new_route_is_routed_with_its_usage_and_errors(tmp_path: Path) -> None:
    key = add_key(path := tmp_path / "keys.toml", Tenant(name="alice", tokens_per_minute=4))
    with (
        run_server() as engine,
        run_router(engine.url, api_keys_file=path) as routing,
        routing.http() as http,
    ):
        http.headers["x-api-key"] = key
        answer = http.post(PATH, json=BODY)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
        assert routing.engine(engine.url).num_prompt_tokens == answer.json()["usage"]["prompt_tokens"]
        refused = http.post(PATH, json=BODY)
        assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
        assert engine.server._service.metrics._requests.labels("POST", PATH, "200")._value.get() == 1


def test_every_route_has_endpoint_and_unique_path() -> None:
    taken = [(method, path) for route in ROUTES for path in route.paths for method in route.methods]
    assert len(set(taken)) == len(taken)
    for route in ROUTES:
        assert (find_endpoint(route).body is not None) == bool(route.work), route.path


def test_route_without_endpoint_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Routes(*ROUTES, Route("/v1/none", "shout:whisper", work="answer"))
    monkeypatch.setattr(octavo.server.serving, "create_app", partial(octavo.server.app.create_app, routes=routes))
    with pytest.raises(AttributeError, match="whisper"), run_server():
        pass


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "octavo.audit"]
