"""Access rights and limits of the router's clients, and the engines' work after a client disconnects."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
from fakes import FakeExecutor
from router.routing import run_router
from running import DEADLINE_S, connect, run_server, wait_until
from starlette.routing import Route

from octavo.http.tenants import Keyring, Tenant, add_key, remove_key

BODY = {"prompt": "hello", "max_tokens": 5}
ENDLESS = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def reload(*running) -> None:
    """Reload the keys as SIGHUP does, on each server's event loop."""
    for each in running:
        done = threading.Event()

        def run(server=each.server, done=done) -> None:
            server.reload()
            done.set()

        each.server.servers[0].get_loop().call_soon_threadsafe(run)
        assert done.wait(DEADLINE_S)


def test_api_keys_file_is_enforced_by_router(tmp_path):
    path = tmp_path / "keys.toml"
    alice = add_key(path, Tenant(name="alice", max_concurrency=2))
    slow = add_key(path, Tenant(name="slow", requests_per_minute=1))
    executor = FakeExecutor()
    with (
        run_server(executor, api_keys_file=path) as engine,
        run_router(engine.url, api_keys_file=path) as routing,
        routing.http() as http,
    ):
        assert http.post(COMPLETIONS, json=BODY).status_code == 401
        assert http.post(COMPLETIONS, json=BODY, headers=bearer("x")).status_code == 401
        assert http.post(COMPLETIONS, json=BODY, headers=bearer(alice)).status_code == 200
        assert http.post(COMPLETIONS, json={**BODY, "n": 3}, headers=bearer(alice)).json()["error"]["param"] == "n"
        assert http.post(COMPLETIONS, json=BODY, headers=bearer(slow)).status_code == 200
        refused = http.post("/v1/messages", json=BODY, headers=bearer(slow))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert engine.executor.num_steps, "the engine was asked as well"


def test_key_reload_ends_streams_of_removed_key(tmp_path):
    path = tmp_path / "keys.toml"
    kept, gone = (add_key(path, Tenant(name=name)) for name in ("kept", "gone"))
    with (
        run_server(FakeExecutor(step_s=0.005), api_keys_file=path) as engine,
        run_router(engine.url, api_keys_file=path) as routing,
        routing.http() as http,
        http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}, headers=bearer(gone)) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        remove_key(path, "gone")
        new = add_key(path, Tenant(name="new"))
        reload(engine, routing)
        *_, error, done = (line for line in lines if line)
        assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("invalid_api_key", "data: [DONE]")
        statuses = [http.post(COMPLETIONS, json=BODY, headers=bearer(key)).status_code for key in (kept, gone, new)]
        assert statuses == [200, 401, 200]
        path.write_text("[keys")
        reload(routing)
        assert http.post(COMPLETIONS, json=BODY, headers=bearer(kept)).status_code == 200


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("body", "num_places"),
    [
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": "a", "n": 4}, 4),
    ],
)
def test_router_and_engine_count_equal_stream_slots(body, num_places):
    executor = FakeExecutor()
    executor.gate.clear()
    with run_server(executor) as engine, run_router(engine.url) as routing, routing.http() as http:
        asking = threading.Thread(target=lambda: http.post(COMPLETIONS, json={**BODY, **body}))
        asking.start()
        streams = engine.server._service.limiter.streams
        wait_until(lambda: streams.num_held, "the engine counts it")
        assert (routing.service.limiter.streams.num_held, streams.num_held) == (num_places, num_places)
        executor.gate.set()
        asking.join(DEADLINE_S)
        wait_until(lambda: not routing.service.limiter.streams.num_held, "they are given back")


def test_prompt_list_above_max_concurrency_is_served(tmp_path):
    path = tmp_path / "keys.toml"
    key = add_key(path, Tenant(name="alice", max_concurrency=2))
    with run_server() as engine, run_router(engine.url, api_keys_file=path) as routing, routing.http() as http:
        answer = http.post(COMPLETIONS, json={**BODY, "prompt": ["a"] * 5}, headers=bearer(key))
        assert len(answer.json()["choices"]) == 5


@pytest.mark.turn(12)
def test_router_requires_read_metrics_for_operator_paths(tmp_path):
    path = tmp_path / "keys.toml"
    plain, operator = (add_key(path, Tenant(name=f"k{may}", read_metrics=bool(may))) for may in (0, 1))
    guarded = tmp_path / "guarded.toml"
    engines_own = add_key(guarded, Tenant(name="plain"))
    with (
        run_server() as engine,
        run_server(api_keys_file=guarded) as strict,
        run_router(engine.url, api_keys_file=path) as routing,
        routing.http() as http,
        strict.http() as direct,
    ):
        paths = [route.path for route in strict.server.config.app.routes if isinstance(route, Route)]
        paths = [each.partition("{")[0] + "x" * ("{" in each) for each in paths]
        closed = {each for each in paths if direct.get(each, headers=bearer(engines_own)).status_code == 403}
        assert closed >= {"/metrics", "/server_info", "/dashboard/events"}
        for each in closed:
            assert http.get(each, headers=bearer(plain)).status_code == 403, each
            if each != "/dashboard/events":  # its answer does not end
                assert http.get(each, headers=bearer(operator)).status_code in {200, 404}, each
        redirected = http.get("/server_info/", headers=bearer(plain))
        assert redirected.headers["location"] == "/server_info", "at the router's own address"
        assert http.get("/%73erver_info", headers=bearer(plain)).status_code == 403
        assert http.get("/version", headers=bearer(plain)).status_code == 200


def test_operator_key_reads_metrics_and_is_not_tenant(tmp_path):
    path = tmp_path / "keys.toml"
    add_key(path, Tenant(name="alice"))
    assert [tenant.name for tenant in Keyring.from_file(path, "secret").tenants] == ["alice"]
    options = {"api_keys_file": path}
    with (
        run_server(**options, operator_key="secret") as engine,
        run_router(engine.url, **options, engine_api_key="secret") as routing,
        engine.http() as http,
    ):
        wait_until(lambda: routing.engine(engine.url).incarnation is not None, "its metrics are read")
        assert routing.engine(engine.url).models == {"fake", "alias/of-fake"}
        assert http.get("/metrics", headers=bearer("secret")).status_code == 200
        reload(engine)
        assert http.get("/metrics", headers=bearer("secret")).status_code == 200
        assert http.get("/metrics").status_code == 401


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnect_costs_engine_at_most_two_steps(is_stream):
    executor = FakeExecutor(step_s=0.02)
    content = json.dumps({**ENDLESS, "stream": is_stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with run_server(executor) as engine, run_router(engine.url) as routing:
        with contextlib.closing(connect(routing)) as sock:
            sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            if is_stream:
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            wait_until(lambda: executor.num_computing_steps > 2, "it is computed")
            executor.gate.clear()
        wait_until(lambda: not engine.server._service.limiter.streams.num_held, "the engine's server has heard of it")
        num_steps = executor.num_computing_steps
        executor.gate.set()
        wait_until(lambda: not engine.num_unfinished, "it is aborted")
        # One step was in flight, and the next one may have been decided already.
        assert executor.num_computing_steps - num_steps <= 1
        assert engine.num_blocks_in_use == 0
