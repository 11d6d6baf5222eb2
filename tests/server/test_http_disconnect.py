"""If a client disconnects, its requests stop. If a server shuts down, its streams end."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent import futures
from typing import Any

import httpx
import pytest
from fakes import FakeExecutor, answer_text
from running import Running, run_server, wait_until

from octavo.server.api import conversation

ENDLESS = {"max_tokens": 2000, "ignore_eos": True}
STEP_S = 0.02  # an answer that is not stopped takes twice as long as any test waits
BODIES = [
    ("/v1/completions", {"prompt": "hello", **ENDLESS}),
    ("/v1/completions", {"prompt": ["one", "two", "three"], "n": 2, **ENDLESS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **ENDLESS}),
]


def check_free(running: Running) -> None:
    wait_until(lambda: running.num_unfinished == 0, "the request is aborted")
    assert running.num_blocks_in_use == 0
    wait_until(lambda: not running.engine.output_processor._states, "its text is forgotten")


@pytest.mark.turn(12)
@pytest.mark.parametrize(("route", "body"), BODIES)
def test_disconnect_during_stream_frees_blocks(route: str, body: dict[str, Any]) -> None:
    executor = FakeExecutor(STEP_S)
    with run_server(executor) as running, running.http() as http:
        with http.stream("POST", route, json={**body, "stream": True}) as stream:
            next(stream.iter_lines())
            assert running.num_blocks_in_use > 0
        check_free(running)
        bystander = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 20})
        assert bystander.json()["choices"][0]["text"] == answer_text(5, 0, 20)


@pytest.mark.parametrize(("route", "body"), BODIES)
def test_disconnect_before_unstreamed_answer_frees_blocks(route: str, body: dict[str, Any]) -> None:
    executor = FakeExecutor(STEP_S)
    with run_server(executor) as running:
        leave_while_waiting(running, route, body, lambda: running.num_blocks_in_use > 0)
        check_free(running)


def test_disconnect_before_first_token_frees_blocks() -> None:
    """The status has not been sent yet: the step that computes the prompt is still in flight."""
    executor = FakeExecutor(STEP_S)
    with run_server(executor) as running:
        executor.gate.clear()
        body = {"prompt": "hello", **ENDLESS, "stream": True}
        leave_while_waiting(running, "/v1/completions", body, lambda: executor.num_steps == 1)
        executor.gate.set()
        check_free(running)


def leave_while_waiting(running: Running, route: str, body: dict[str, Any], ready: Any) -> None:
    """Send a request on its own connection, and close it without reading the answer."""
    client = running.http()

    def post() -> None:
        try:
            client.post(route, json=body)
        except httpx.HTTPError:
            return

    thread = threading.Thread(target=post)
    thread.start()
    wait_until(ready, "the request runs")
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
        stream = connection._connection._network_stream
        stream.get_extra_info("socket").shutdown(2)
    thread.join(20)
    assert not thread.is_alive()
    client.close()


def test_f22_abort_takes_effect_within_two_steps() -> None:
    executor = FakeExecutor(STEP_S)
    with run_server(executor) as running, running.http() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "hello", **ENDLESS, "stream": True}) as stream:
            next(stream.iter_lines())
            executor.gate.clear()
        wait_until(lambda: not running.server._service.limiter.streams.num_held, "the server has heard of it")
        num_steps, num_computing_steps = executor.num_steps, executor.num_computing_steps
        executor.gate.set()
        check_free(running)
        # One step was in flight, and the next one may have been decided already. One more notifies the worker.
        assert executor.num_computing_steps - num_computing_steps <= 1
        assert executor.num_steps - num_steps <= 2


@pytest.mark.turn(12)
@pytest.mark.parametrize(("grace_s", "num_tokens"), [(0.0, 2000), (30.0, 50)])
def test_shutdown_drains_or_ends_open_streams(grace_s: float, num_tokens: int) -> None:
    executor = FakeExecutor(STEP_S)
    body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with run_server(executor, grace_s=grace_s) as running, running.http() as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            running.server.handle_exit(15, None)
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        running.thread.join(20)
        assert not running.thread.is_alive()
    assert events[-1] == "[DONE]"
    chunks, expected = [json.loads(event) for event in events[:-1]], answer_text(5, 0, num_tokens)
    if not grace_s:
        assert chunks.pop()["error"]["code"] == "server_closing"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    reasons = {chunk["choices"][0]["finish_reason"] for chunk in chunks}
    assert expected.startswith(text)
    assert (text == expected, reasons) == ((True, {None, "length"}) if grace_s else (False, {None}))


MESSAGES = [{"role": "user", "content": "hello"}]
ENDS = {  # how each API's streams report that the server shuts down
    "/v1/completions": ({"prompt": "hello", "max_tokens": 5000, "ignore_eos": True}, "server_closing"),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 5000, "ignore_eos": True}, "server_closing"),
    "/v1/responses": ({"input": "hello", "max_output_tokens": 5000, "ignore_eos": True}, "server_closing"),
    "/v1/messages": ({"model": "fake", "messages": MESSAGES, "max_tokens": 5000}, "overloaded_error"),
    "/generate": ({"inputs": "hello", "parameters": {"max_new_tokens": 2000}}, "shutting down"),
}
# Texts that mark the last event of a stream, of any API.
TERMINAL = ("[DONE]", "event: message_stop", "event: error", "event: response.completed", "event: response.failed")
TERMINAL += ("event: response.incomplete", '"error_type"', '"generated_text":"')


@pytest.mark.parametrize("route", ENDS)
def test_shutdown_ends_every_answer_with_one_error(route: str) -> None:
    body, word = ENDS[route]
    executor = FakeExecutor(STEP_S, answer="and so on " * 600)
    with run_server(executor) as running, running.http() as http, running.http() as other:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(other.post(route, json=body)))
        thread.start()
        streamed = "/generate_stream" if route == "/generate" else route
        with http.stream("POST", streamed, json={**body, "stream": True}) as stream:
            wait_until(lambda: running.num_unfinished == 2, "both are at work")
            running.server.handle_exit(15, None)
            told = stream.read().decode()
        thread.join(20)
    assert answers[0].status_code == 503
    assert word in answers[0].text
    assert told.count(word) == 1
    assert "abort" not in answers[0].text + told
    terminal = [line for line in told.splitlines() if any(end in line for end in TERMINAL)]
    assert len(terminal) == 1, terminal


def test_prompt_tokenized_during_shutdown_never_reaches_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, goes_on = threading.Event(), threading.Event()
    body = {"prompt": "hello " * 100, "max_tokens": 5000, "ignore_eos": True}
    with run_server(FakeExecutor(STEP_S)) as running, running.http() as http, futures.ThreadPoolExecutor(1) as pool:
        inputs = running.engine.input_processor
        process = inputs.process

        def slowly(*args: Any, **options: Any) -> Any:
            reads.set()
            goes_on.wait(20)
            return process(*args, **options)

        monkeypatch.setattr(inputs, "process", slowly)
        answer = pool.submit(http.post, "/v1/completions", json=body)
        assert reads.wait(20)
        running.server.handle_exit(15, None)
        wait_until(lambda: running.server._service._is_ending, "what is open is ended")
        goes_on.set()
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "server_closing")
        assert running.num_unfinished == 0


def test_admitted_request_is_answered_during_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, render = threading.Event(), threading.Event(), conversation.render

    async def slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        await asyncio.to_thread(goes_on.wait, 20)
        return await render(*args, **options)

    monkeypatch.setattr(conversation, "render", slowly)
    with run_server(grace_s=30.0) as running, running.http() as http, futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 5})
        assert begun.wait(20)
        running.server.handle_exit(15, None)
        wait_until(lambda: running.server._service.is_closing, "the door is closed")
        goes_on.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_f26_shutdown_ends_requests_during_long_step(route: str) -> None:
    """A step may take longer than a shutdown waits. Streams and whole answers are ended before the step ends."""
    executor = FakeExecutor(STEP_S)
    body: dict[str, Any] = next(body for path, body in BODIES if path == route)
    with run_server(executor) as running, running.http() as http, futures.ThreadPoolExecutor(1) as pool:
        with http.stream("POST", route, json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            whole = pool.submit(http.post, route, json=body)
            wait_until(lambda: running.num_unfinished == 2, "both are at work")
            executor.gate.clear()
            running.server.handle_exit(15, None)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-2])["error"]["code"] == "server_closing"
        assert events[-1] == "[DONE]"
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_closing")
        assert not executor.gate.is_set()
        executor.gate.set()
        running.thread.join(20)
        assert not running.thread.is_alive()


@pytest.mark.turn(12)
def test_draining_server_answers_503_to_new_requests() -> None:
    executor = FakeExecutor(STEP_S)
    body = {"prompt": "hello", "max_tokens": 50, "stream": True}
    with run_server(executor, grace_s=30.0) as running, running.http() as http, running.http() as kept:
        assert kept.get("/ready").status_code == 200
        with http.stream("POST", "/v1/completions", json=body) as stream:
            executor.gate.clear()
            running.server.handle_exit(15, None)
            wait_until(lambda: _asked(running, "GET", "/ready").status_code == 503, "it is not ready")
            assert [_asked(running, "GET", path).status_code for path in ("/health", "/live")] == [200, 200]
            refused = [kept.get("/ready"), _asked(running, "GET", "/ready")]
            refused += [_asked(running, "POST", route, json=body) for route, body in BODIES]
            for answer in refused:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_closing")
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["connection"] == "close"
            assert running.thread.is_alive()
            executor.gate.set()
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        running.thread.join(20)
        assert not running.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            _asked(running, "GET", "/health")


def _asked(running: Running, method: str, path: str, **request: Any) -> httpx.Response:
    """Return the answer to a request on a new connection."""
    with running.http() as http:
        return http.request(method, path, **request)


def test_idle_server_stops_immediately() -> None:
    with run_server(grace_s=600.0) as running, running.http() as http:
        assert http.get("/ready").status_code == 200  # this connection stays open
        running.server.handle_exit(15, None)
        running.thread.join(20)
        assert not running.thread.is_alive()


def test_second_signal_stops_immediately() -> None:
    executor = FakeExecutor(STEP_S)
    body = {"prompt": "hello", **ENDLESS, "stream": True}
    with run_server(executor, grace_s=600.0) as running, running.http() as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.server.handle_exit(15, None)
            wait_until(lambda: _asked(running, "GET", "/ready").status_code == 503, "it is not ready")
            running.server.handle_exit(15, None)
            running.thread.join(20)
            assert not running.thread.is_alive()
        check_free(running)
