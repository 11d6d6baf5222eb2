"""Engines that fail, freeze, shut down or are full: each request ends once, and no answer is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import threading
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest
import uvicorn
from certificates import make_certificate
from fakes import FakeExecutor
from router.routing import run_router
from running import DEADLINE_S, asking, run_server, short_pauses, wait_until

from octavo.http.listening import bind
from octavo.http.routes import ROUTES
from octavo.router.upstream import is_local_failure, is_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
LARGE = b'{"text":"' + b"x" * (32 << 20) + b'"}'
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
LINE = b'{"message":{"role":"assistant","content":"a"},"done":false}\n'


class MadeUp:
    """A small fake engine. does: its action for a POST, see `_answer`. last: bytes after the first event."""

    def __init__(self, does: str, last: bytes = b"") -> None:
        self.last = last
        self.does, self.num_posts, self.num_left = does, 0, 0
        self.is_ready = True
        self.release = threading.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            status = 200 if scope["path"] != "/ready" or self.is_ready else 503
            await _send(send, status, b'{"data": []}')
            return
        self.num_posts += 1
        while (await receive()).get("more_body"):
            pass
        try:
            await self._answer(receive, send, is_lines=scope["path"].startswith("/api/"))
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def _answer(self, receive, send, *, is_lines: bool) -> None:
        event, kind = (LINE, b"application/x-ndjson") if is_lines else (EVENT, b"text/event-stream")
        match self.does:
            case "answer":
                await _send(send, 200, b'{"usage":{"prompt_tokens":9,"completion_tokens":2}}')
            case "large":
                await _send(send, 200, LARGE)
            case "full" | "closing":
                status = 429 if self.does == "full" else 503
                await _send(send, status, b'{"error":{"message":"full"}}', [(b"retry-after", b"7")])
            case "die":
                _die(receive)
            case "die in mid-stream" | "hang in mid-stream" | "die within an event":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
                await send({"type": "http.response.body", "body": event + self.last, "more_body": True})
                if self.does == "hang in mid-stream":
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    self.num_left += 1
                    return
                if self.does == "die within an event":
                    await send({"type": "http.response.body", "body": event[:20], "more_body": True})
                await asyncio.sleep(0.01)  # lets the router read the bytes before the connection is reset
                _die(receive)
            case "hang":
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.num_left += 1


def _die(receive) -> None:
    """Reset a connection, as if its process were killed."""
    receive.__self__.transport.abort()


async def _send(send, status, body, headers=()) -> None:
    headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def made_up(does: str, last: bytes = b"") -> Iterator[tuple[str, MadeUp]]:
    """Run one on a free port. Yield its address and the engine."""
    app = MadeUp(does, last)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    with short_pauses():
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", app
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


@pytest.mark.turn(12)
@pytest.mark.parametrize("trouble", ["die", "full", "closing"])
def test_request_without_answer_is_retried_on_another_engine(trouble):
    with (
        made_up(trouble) as (bad, failing),
        made_up("answer") as (good, answering),
        run_router(bad, good, policy="round_robin") as routing,
        routing.http() as http,
    ):
        answers = [http.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert answering.num_posts == 4
        assert failing.num_posts >= 1
        assert routing.engine(bad).num_failures == (failing.num_posts if trouble == "die" else 0)


def test_request_is_retried_only_once():
    with (
        made_up("die") as (first, one),
        made_up("die") as (second, two),
        made_up("die") as (third, three),
        run_router(first, second, third) as routing,
        routing.http() as http,
    ):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
        assert one.num_posts + two.num_posts + three.num_posts == 2
        assert http.post("/v1/messages", json=CHAT).json()["error"]["type"] == "overloaded_error"


def test_full_engines_give_429_with_retry_after():
    with (
        made_up("full") as (first, one),
        made_up("full") as (second, two),
        run_router(first, second) as routing,
        routing.http() as http,
    ):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert (one.num_posts, two.num_posts) == (1, 1)


STREAM_ENDS = {
    "/v1/completions": lambda lines: (
        json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_lost" and lines[-1] == "data: [DONE]"
    ),
    "/v1/messages": lambda lines: (
        lines[-2] == "event: error" and json.loads(lines[-1].removeprefix("data: "))["type"] == "error"
    ),
    "/generate_stream": lambda lines: json.loads(lines[-1].removeprefix("data: "))["error_type"] == "generation",
    "/api/chat": lambda lines: "the engine that served this request was lost" in json.loads(lines[-1])["error"],
    "/v1/responses": lambda lines: json.loads(lines[-1].removeprefix("data: "))["code"] == "engine_lost",
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("path", STREAM_ENDS)
@pytest.mark.parametrize("trouble", ["die in mid-stream", "die within an event"])
def test_lost_engine_ends_stream_with_error_of_api(path, trouble):
    with (
        made_up(trouble) as (bad, failing),
        made_up("answer") as (good, answering),
        run_router(bad, good, policy="round_robin") as routing,
        routing.http() as http,
    ):
        with http.stream("POST", path, json={**CHAT, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[0] == (LINE if path == "/api/chat" else EVENT).decode().strip()
        assert STREAM_ENDS[path](lines)
        assert (failing.num_posts, answering.num_posts) == (1, 0)


LAST_EVENTS = {
    "/v1/completions": [b"data: [DONE]\n\n"],
    "/v1/messages": [b'event: message_stop\ndata: {"type":"message_stop"}\n\n', b"event: error\ndata: {}\n\n"],
    "/generate_stream": [
        b'data: {"index":2,"token":{"text":"\\"details\\":null"},"generated_text":"aa","details":{"seed":null}}\n\n',
        b'data: {"error":"x","error_type":"generation"}\n\n',
    ],
    "/v1/responses": [
        b'event: response.completed\ndata: {"response":{}}\n\n',
        b'event: response.incomplete\ndata: {"response":{}}\n\n',
        b'event: response.failed\ndata: {"response":{}}\n\n',
        b"event: error\ndata: {}\n\n",
    ],
    "/api/chat": [b' {"done":true,"done_reason":"stop"}\n', b'{"error":"x"}\n'],
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("path", "last"), [(path, last) for path, events in LAST_EVENTS.items() for last in events])
def test_engine_lost_after_last_event_adds_no_error(path, last):
    with (
        made_up("die in mid-stream", last) as (bad, failing),
        run_router(bad) as routing,
        routing.http() as http,
    ):
        first = LINE if path.startswith("/api/") else EVENT
        assert http.post(path, json={**CHAT, "stream": True}).content == first + last
        assert failing.num_posts == 1


def test_engine_frozen_after_last_event_adds_no_error():
    last = b"data: [DONE]\n\n"
    whole = EVENT + last
    with (
        made_up("hang in mid-stream", last) as (frozen, _),
        run_router(frozen) as routing,
        routing.http() as http,
        http.stream("POST", "/v1/completions", json={**CHAT, "stream": True}) as response,
    ):
        pieces = response.iter_bytes()
        answer = next(pieces)
        while answer != whole:
            answer += next(pieces)
        routing.server.servers[0].get_loop().call_soon_threadsafe(routing.service.pool.lost, routing.engine(frozen))
        assert list(pieces) == []


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/completions", b'data: {"text":"data: [DONE]"}\n\n'),
        ("/v1/messages", b'event: delta\ndata: {"text":"event: message_stop"}\n\n'),
        ("/generate_stream", b'data: {"token":{"text":"\\"details\\":{"},"details":null}\n\n'),
        ("/v1/responses", b'event: response.output_text.done\ndata: {"text":"event: error"}\n\n'),
        ("/api/chat", b'{"message":{"tool_calls":[{"function":{"arguments":{"done":true}}}]},"done":false}'),
        ("/api/chat", b"no JSON"),
    ],
)
def test_event_quoting_end_marker_is_not_last_event(path, event):
    assert not ROUTES.api(path).is_last(event)


def test_request_of_lost_engine_is_retried_on_another():
    with (
        made_up("hang") as (frozen, hanging),
        made_up("answer") as (good, answering),
        run_router(frozen, good, policy="round_robin") as routing,
        routing.http() as http,
    ):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=CHAT)))
        thread.start()
        wait_until(lambda: hanging.num_posts, "it hangs")
        routing.server.servers[0].get_loop().call_soon_threadsafe(routing.service.pool.lost, routing.engine(frozen))
        thread.join(DEADLINE_S)
        assert answers[0].status_code == 200
        assert answering.num_posts == 1
        wait_until(lambda: hanging.num_left, "the frozen one's connection is closed")


def test_unready_engine_receives_no_requests():
    with (
        made_up("answer") as (first, one),
        made_up("answer") as (second, two),
        run_router(first, second, policy="round_robin") as routing,
        routing.http() as http,
    ):
        one.is_ready = False
        routing.wait_ready(1)
        for _ in range(3):
            http.post("/v1/completions", json=CHAT)
        assert (one.num_posts, two.num_posts) == (0, 3)
        two.is_ready = False
        routing.wait_ready(0)
        answer = http.post("/v1/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert "retry-after" in answer.headers
        assert [http.get(path).status_code for path in ("/health", "/live", "/ready")] == [503, 200, 503]
        one.is_ready = True
        routing.wait_ready(1)
        assert http.post("/v1/completions", json=CHAT).status_code == 200


def test_dead_engine_is_removed_from_ready_engines():
    with (
        made_up("answer") as (good, _),
        run_server() as running,
        run_router(good, running.url) as routing,
        routing.http() as http,
    ):
        running.server.should_exit = True
        routing.wait_ready(1)
        assert http.post("/v1/completions", json=CHAT).status_code == 200


def test_client_disconnect_aborts_streaming_request_in_engine():
    executor = FakeExecutor(step_s=0.002)
    with run_server(executor) as running, run_router(running.url) as routing, routing.http() as http:
        body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: not running.num_unfinished, "it is aborted")
        wait_until(lambda: not routing.engine(running.url).routed_requests, "the router has forgotten it")
        assert routing.engine(running.url).open_tokens == 0


def test_client_disconnect_before_answer_aborts_request():
    with made_up("hang") as (url, hanging), run_router(url) as routing:
        with asking(routing, "/v1/completions", CHAT):
            wait_until(lambda: hanging.num_posts, "it hangs")
        wait_until(lambda: hanging.num_left, "the engine hears of it")
        assert routing.engine(url).num_failures == 0


def test_router_shutdown_ends_open_streams_with_error():
    with made_up("hang in mid-stream") as (url, hanging), run_router(url) as routing, routing.http() as http:
        with http.stream("POST", "/v1/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            routing.server.should_exit = True
            left = [line for line in lines if line]
        assert json.loads(left[0].removeprefix("data: "))["error"]["code"] == "server_closing"
        wait_until(lambda: hanging.num_left, "the engine hears of it")


def test_engine_loss_does_not_retry_buffered_answer():
    """The client reads slowly. It gets the complete answer, once."""
    with (
        made_up("large") as (url, first),
        made_up("large") as (other, second),
        run_router(url, other) as routing,
        routing.http() as http,
        http.stream("POST", "/v1/chat/completions", json=CHAT) as got,
    ):
        reading = got.iter_raw(1 << 16)
        received = len(next(reading))
        for each in (url, other):
            routing.service.pool.lost(routing.engine(each))
        received += sum(map(len, reading))
        assert received == len(LARGE)
        assert first.num_posts + second.num_posts == 1


def test_huge_token_counts_do_not_stop_health_checks():
    """Numbers of 400 digits are for the engine to refuse. The router counts them as a large number."""
    with made_up("answer") as (url, _), run_router(url) as routing, routing.http() as http:
        engine = routing.engine(url)
        for count in (10**400, 10**18):
            text = json.dumps({**CHAT, "max_tokens": 1, "n": 1}).replace('"n": 1', f'"n": {count}')
            text = text.replace('"max_tokens": 1', f'"max_tokens": {count}')
            assert http.post("/v1/chat/completions", content=text).status_code in {200, 429}
        assert engine.num_sent_tokens < 1 << 40
        routing.service.pool.lost(engine)
        routing.wait_ready(1)


def test_request_answered_503_is_retried_once():
    """A restarting engine answers 503 to its requests."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(made_up("closing")) for _ in range(4)]
        routing = stack.enter_context(run_router(*(url for url, _ in engines)))
        http = stack.enter_context(routing.http())
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert sum(engine.num_posts for _, engine in engines) == 2


def test_local_resource_error_does_not_mark_engine_lost():
    own, refused = OSError(errno.EMFILE, "too many open files"), ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert (is_local_failure(own), is_refusal(own)) == (True, False)
    assert (is_local_failure(refused), is_refusal(refused)) == (False, True)
    with made_up("hang") as (url, engine), run_router(url) as routing:
        upstream = routing.service.upstream
        get, upstream.get = upstream.get, AsyncMock(side_effect=own)
        with asking(routing, "/v1/completions", CHAT):
            wait_until(lambda: upstream.get.call_count >= 5 and engine.num_posts == 1, "it was looked at often")
            assert routing.engine(url).is_ready
            assert len(routing.engine(url).routed_requests) == 1
        upstream.get = get


def test_health_checks_continue_after_unexpected_error():
    with made_up("answer") as (url, _), run_router(url) as routing:
        upstream = routing.service.upstream
        get, upstream.get = upstream.get, AsyncMock(side_effect=ValueError("odd"))
        wait_until(lambda: upstream.get.call_count >= 3, "it is looked at all the same")
        upstream.get = get
        routing.service.pool.lost(routing.engine(url))
        routing.wait_ready(1)


@pytest.mark.turn(8)
def test_tls_engine_requires_trusted_certificate(tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with run_server(ssl_certfile=certificate, ssl_keyfile=key) as engine:
        url = engine.url.replace("http://127.0.0.1", "https://127.0.0.1")
        with run_router(url) as routing, routing.http() as http:
            answers = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200] * 3
            body = {"prompt": "a", "max_tokens": 40, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                assert list(response.iter_lines())[-2] == "data: [DONE]"
        monkeypatch.delenv("SSL_CERT_FILE")
        with run_router(url, num_ready=0) as routing, routing.http() as http:
            assert http.post("/v1/completions", json=CHAT).status_code == 503, "nobody vouches for it"
