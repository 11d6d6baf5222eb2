"""A request's way through a router, step by step, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from router.in_process import URLS, USAGE, Client, answer
from router.virtual_time import run_virtually
from starlette.exceptions import HTTPException

from octavo.http.errors import CLIENT_DISCONNECTED
from octavo.http.tenants import EVERYBODY, Tenant

STREAM = "text/event-stream"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
LAST = b"data: [DONE]\n\n"
LONG = {"prompt": [7] * 300, "max_tokens": 4}
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def hang(_connection) -> None:
    """Never answer."""


def error_code(told) -> tuple[int, str]:
    return told[0], json.loads(told[1])["error"]["code"]


def test_answer_usage_is_counted_and_charged():
    async def work(_now):
        client = Client(1)
        charged = []
        client.service.limiter.charge = lambda tenant, num_tokens: charged.append((tenant, num_tokens))
        told = await client.ask()
        assert told == (200, b'{"usage":' + json.dumps(USAGE, separators=(",", ":")).encode() + b"}")
        (engine,) = client.engines
        assert (engine.num_prompt_tokens, engine.num_cached_tokens) == (300, 30)
        assert (engine.num_failures, engine.open_tokens, len(engine.routed_requests)) == (0, 0, 0)
        assert charged == [(EVERYBODY, 300)]
        assert client.state["audit"]["engine"] == engine.url
        assert client.service.limiter.streams.num_held == 0
        client.answers(answer({"error": 1}))
        await client.ask()
        assert len(charged) == 1  # an answer without usage charges nothing

    run_virtually(work)


@pytest.mark.parametrize("is_told_all", [False, True])
def test_failed_request_is_retried_once(caplog, is_told_all):
    async def work(_now):
        client = Client(3)
        suspected = []
        client.service.suspect = suspected.append
        client.answers(ConnectionResetError("gone"))
        if is_told_all:
            for index in (1, 2):
                client.answers(ConnectionResetError("gone"), of=index)
        told = await client.ask()
        num_tried = 2
        assert len(client.upstream.summary) == num_tried
        assert [engine.num_failures for engine in client.engines] == [1, int(is_told_all), 0]
        assert suspected == [engine for engine, _, _ in client.upstream.summary][: 2 if is_told_all else 1]
        if is_told_all:
            assert error_code(told) == (503, "engine_lost")
        else:
            assert told[0] == 200
            assert client.state["audit"]["engine"] == URLS[1]
        assert caplog.text.count("failed a request before its answer began") == 1
        assert "failed a request: ConnectionResetError: gone" in caplog.text

    caplog.set_level(logging.INFO)
    run_virtually(work)


def test_failure_of_only_engine_gives_engine_lost():
    async def work(_now):
        client = Client(1)
        client.answers(ConnectionResetError("gone"))
        assert error_code(await client.ask()) == (503, "engine_lost")

    run_virtually(work)


def test_refusal_with_smallest_retry_after_wins():
    async def work(_now):
        client = Client(3)
        for index, more in enumerate(("retry-after: 9\r\n", "retry-after: 2\r\n", "")):
            client.answers(answer({"from": index}, 429, more=more), of=index)
        assert await client.ask() == (429, b'{"from":1}')
        assert len(client.upstream.summary) == 3  # a full engine has not failed
        start = next(message for message in client.sent if message["type"] == "http.response.start")
        assert (b"retry-after", b"2") in start["headers"]
        assert [engine.num_failures for engine in client.engines] == [0, 0, 0]

    run_virtually(work)


def test_closing_engines_get_only_one_retry():
    async def work(_now):
        client = Client(3)
        for index in range(3):
            client.answers(answer({"from": index}, 503), of=index)
        assert await client.ask() == (503, b'{"from":0}')
        assert len(client.upstream.summary) == 2

    run_virtually(work)


def test_missing_engine_gives_503_with_retry_after():
    async def work(_now):
        client = Client(2, health_interval_s=3.0)
        client.engines[0].models, client.engines[1].models = frozenset({"x"}), frozenset({"y"})
        client.engines[1].is_ready = False
        told = await client.ask(model="y", prompt="a")
        assert error_code(told)[0] == 503
        start = next(message for message in client.sent if message["type"] == "http.response.start")
        assert (b"retry-after", b"3") in start["headers"]

    run_virtually(work)


def test_client_disconnect_yields_client_left_status():
    async def work(_now):
        client = Client(1)
        client.answers(hang)
        asking = asyncio.ensure_future(client.ask())
        await asyncio.sleep(1.0)
        client.leaves.set()
        assert await asking == (CLIENT_DISCONNECTED, b"")
        (engine,) = client.engines
        assert (engine.num_failures, engine.open_tokens, engine.routed_requests) == (0, 0, set())
        assert client.upstream.transports[0].is_closed

    run_virtually(work)


def test_disconnect_during_stream_sends_no_second_status():
    async def work(_now):
        client = Client(1)

        async def begin(connection):
            connection.data_received(CHUNKED + chunk(EVENT))

        client.answers(begin)
        asking = asyncio.ensure_future(client.ask(stream=True, prompt="a"))
        await asyncio.sleep(1.0)
        client.leaves.set()
        status, _ = await asking
        assert status == 200
        assert sum(message["type"] == "http.response.start" for message in client.sent) == 1
        assert client.engines[0].num_failures == 0

    run_virtually(work)


def test_expired_request_timeout_header_gives_504():
    async def work(now):
        client = Client(1)
        client.answers(hang)
        told = await client.ask(headers=[(b"x-request-timeout", b"7")])
        assert (told[0], b"7 s" in told[1]) == (504, True)
        assert now() == pytest.approx(7.0, abs=0.1)

    run_virtually(work)


@pytest.mark.parametrize(
    ("path", "error"),
    [("/v1/completions", b"data: [DONE]"), ("/v1/messages", b"event: error"), ("/api/chat", b'{"error"')],
)
def test_cut_stream_ends_with_error_event(path, error):
    async def work(_now):
        client = Client(1)
        kind = b"application/x-ndjson" if path.startswith("/api") else b"text/event-stream"
        event = b'{"a":1}\n' if path.startswith("/api") else EVENT

        async def begin(connection):
            connection.data_received(CHUNKED.replace(b"text/event-stream", kind) + chunk(event) + chunk(event[:5]))
            await asyncio.sleep(1.0)
            connection.connection_lost(ConnectionResetError("reset"))

        client.answers(begin)
        suspected = []
        client.service.suspect = suspected.append
        status, body = await client.ask(path, stream=True, prompt="a")
        assert (status, body.startswith(event), body.count(event)) == (200, True, 1)
        assert error in body[len(event) :]
        assert client.sent[-1]["type"] == "http.response.body"
        assert not client.sent[-1].get("more_body")
        assert (client.engines[0].num_failures, suspected) == (1, client.engines)
        assert client.state["error"].code == "engine_lost"

    run_virtually(work)


def test_cut_after_last_event_adds_no_error():
    async def work(_now):
        client = Client(1)

        async def begin(connection):
            connection.data_received(CHUNKED + chunk(EVENT + LAST))
            await asyncio.sleep(1.0)
            connection.connection_lost(ConnectionResetError("reset"))

        client.answers(begin)
        assert await client.ask(stream=True, prompt="a") == (200, EVENT + LAST)
        assert client.engines[0].num_failures == 0
        assert "error" not in client.state

    run_virtually(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/x"])
@pytest.mark.parametrize("last", [LAST, b""])
def test_inference_stream_without_length_requires_last_event(path, last):
    async def work(_now):
        client = Client(1)
        client.upstream.ends = True
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        client.answers(head + EVENT + last)
        told = await client.ask(path, stream=True, prompt="a")
        is_cut = path == "/v1/completions" and not last
        assert (b'"engine_lost"' in told[1]) is is_cut
        assert (told == (200, EVENT + last)) is not is_cut

    run_virtually(work)


@pytest.mark.parametrize(("body", "is_whole"), [(b'{"a":1}', True), (b'{"a":', False)])
def test_json_without_length_must_be_complete(body, is_whole):
    async def work(_now):
        client = Client(1)
        client.upstream.ends = True
        client.answers(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body)
        told = await client.ask()
        assert (told == (200, body)) is is_whole
        assert client.engines[0].num_failures == (not is_whole)

    run_virtually(work)


def test_json_above_limit_is_streamed_and_counted():
    async def work(_now):
        client = Client(1, max_answer_bytes=1 << 20)
        body = {"text": "x" * (3 << 20), "usage": USAGE}
        data = answer(body)

        async def feed(connection):
            for start in range(0, len(data), 1 << 18):
                connection.data_received(data[start : start + (1 << 18)])
                await asyncio.sleep(0.1)

        client.answers(feed)
        status, told = await client.ask()
        assert (status, json.loads(told)) == (200, body)
        sizes = [len(message["body"]) for message in client.sent if message.get("more_body")]
        assert sizes[0] > 1 << 20
        assert len(sizes) > 2
        assert client.engines[0].num_prompt_tokens == 300

    run_virtually(work)


def test_plain_text_answer_is_forwarded_unchanged():
    async def work(_now):
        client = Client(1)
        client.answers(answer(b"plain" * 1000, kind="text/plain"))
        assert await client.ask("/metrics_of_mine") == (200, b"plain" * 1000)

    run_virtually(work)


def test_wrong_method_on_router_path_gives_405():
    async def work(_now):
        with pytest.raises(HTTPException) as error:
            await Client(1).ask("/metrics")
        assert error.value.status_code == 405

    run_virtually(work)


def test_server_info_without_read_metrics_gives_403():
    async def work(_now):
        client = Client(1)
        told = await client.ask("/server_info", tenant=Tenant(name="a"))
        assert (told[0], b"read_metrics" in told[1]) == (403, True)
        assert not client.upstream.summary

    run_virtually(work)


@pytest.mark.parametrize(
    ("method", "path", "num_held"),
    [("POST", "/v1/completions", 3), ("POST", "/tokenize", 3), ("GET", "/v1/completions", 0), ("POST", "/other", 0)],
)
def test_only_inference_requests_hold_stream_slots(method, path, num_held):
    async def work(_now):
        client, held = Client(1), []

        async def look(connection):
            held.append(client.service.limiter.streams.num_held)
            connection.data_received(answer({}))

        client.answers(look)
        assert (await client.ask(path, method=method, prompt="a", n=3))[0] == 200
        assert held == [num_held]
        assert client.service.limiter.streams.num_held == 0

    run_virtually(work)


def test_get_has_timeout_only_with_timeout_header():
    """A dashboard's answer does not end."""

    async def work(now):
        client = Client(1, request_timeout_s=5.0)

        async def late(connection):
            await asyncio.sleep(20.0)
            connection.data_received(answer({}))

        client.answers(late)
        assert (await client.ask("/x", method="GET"))[0] == 200
        assert (await client.ask("/x", method="HEAD"))[0] == 200
        begun_at = now()
        assert (await client.ask("/x", method="GET", headers=[(b"x-request-timeout", b"9")]))[0] == 504
        assert now() == pytest.approx(begun_at + 5.0, abs=0.1)
        assert (await client.ask("/x"))[0] == 504

    run_virtually(work)
