"""Engines that never answer, or stop midway. Each request ends once and in time, on another engine if possible."""

from __future__ import annotations

import asyncio
import json

import pytest
from router.routing import run_router
from router.scripted_engine import scripted
from router.streams import HEAD, raw_engine
from router.virtual_time import run_virtually
from running import asking, run_server, wait_until

from octavo.config import RouterConfig
from octavo.errors import ConfigError, DeadlineError
from octavo.http.tenants import EVERYBODY
from octavo.http.timeouts import TimeoutQueue
from octavo.router.engines import EngineHandle
from octavo.router.request_summary import RequestSummary
from octavo.router.routed_request import RoutedRequest
from octavo.router.service import RouterService
from octavo.router.upstream import Upstream

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"text":""}'
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
PATH = "/v1/chat/completions"
SHORT_S = 0.1


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = b'data: {"text":"a"}\n\n'
STREAM = HEAD + chunk(EVENT)


def error_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-"], ids=["nothing", "half of its headers"])
def test_request_to_silent_engine_is_retried_on_another(begun):
    with (
        raw_engine(begun, "silent") as (silent, hanging),
        raw_engine(ANSWER) as (good, answering),
        run_router(silent, good, policy="round_robin", engine_first_byte_timeout_s=SHORT_S) as routing,
        routing.http() as http,
    ):
        answers = [http.post(PATH, json=CHAT).status_code for _ in range(2)]
        assert answers == [200, 200]
        assert (hanging.num_posts, answering.num_posts) == (1, 2)
        assert routing.engine(silent).num_failures == 1
        wait_until(lambda: hanging.num_left, "the engine hears of it")


@pytest.mark.parametrize("begun", [b"", JSON_HEAD + b'{"'], ids=["nothing", "half of its JSON"])
def test_engine_timeout_without_alternative_gives_504(begun):
    with (
        raw_engine(begun, "silent") as (url, hanging),
        run_router(url, engine_first_byte_timeout_s=SHORT_S, engine_idle_timeout_s=SHORT_S) as routing,
        routing.http() as http,
    ):
        answer = http.post(PATH, json=CHAT)
        assert error_of(answer) == (504, "engine_timeout")
        assert answer.headers["x-should-retry"] == "false"
        wait_until(lambda: hanging.num_left, "the engine hears of it")
        engine = routing.engine(url)
        assert (engine.num_failures, engine.open_tokens, len(engine.routed_requests)) == (1, 0, 0)
        assert 'code="engine_timeout"' in http.get("/metrics").text


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ({"X-Request-Timeout": str(SHORT_S)}, {}),
        ({}, {"request_timeout_s": SHORT_S}),
        ({"X-Request-Timeout": "99"}, {"request_timeout_s": SHORT_S}),
    ],
)
@pytest.mark.parametrize("begun", [b"", JSON_HEAD + b'{"', b"HTTP/1.1 200 OK\r\n"])
def test_request_timeout_gives_504_without_retry(headers, options, begun):
    with (
        raw_engine(begun, "silent") as (url, hanging),
        raw_engine(begun, "silent") as (other, second),
        run_router(url, other, **options) as routing,
        routing.http() as http,
    ):
        answer = http.post(PATH, json=CHAT, headers=headers)
        assert error_of(answer) == (504, "request_timeout")
        assert hanging.num_posts + second.num_posts == 1
        wait_until(lambda: hanging.num_left + second.num_left, "the engine hears of it")
        assert [engine.num_failures for engine in routing.service.pool.engines.values()] == [0, 0]
        assert not routing.service.limiter.streams.num_held


@pytest.mark.sweep(12)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", ""])
def test_invalid_request_timeout_header_gives_400(value):
    with raw_engine(ANSWER) as (url, engine), run_router(url) as routing, routing.http() as http:
        answer = http.post(PATH, json=CHAT, headers={"X-Request-Timeout": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")
        assert engine.num_posts == 0


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("options", "headers", "code"),
    [
        ({"engine_idle_timeout_s": SHORT_S}, {}, "engine_timeout"),
        ({}, {"X-Request-Timeout": str(SHORT_S)}, "request_timeout"),
    ],
)
@pytest.mark.parametrize("half", [b"", chunk(EVENT[:9])], ids=["after an event", "within an event"])
def test_stalled_stream_ends_with_timeout_error_event(options, headers, code, half):
    with (
        raw_engine(STREAM + half, "silent") as (url, hanging),
        run_router(url, **options) as routing,
        routing.http() as http,
    ):
        answer = http.post(PATH, json={**CHAT, "stream": True}, headers=headers)
        first, error, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert (first + "\n\n").encode() == EVENT
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == code
        assert last == "data: [DONE]"
        wait_until(lambda: hanging.num_left == 1, "the engine hears of it")
        assert routing.engine(url).num_failures == (code == "engine_timeout")


@pytest.mark.turn(12)
def test_stall_after_last_event_keeps_stream_complete():
    whole = EVENT + b"data: [DONE]\n\n"
    for options in ({"engine_idle_timeout_s": SHORT_S}, {"request_timeout_s": SHORT_S}):
        with (
            raw_engine(HEAD + chunk(whole), "silent") as (url, _),
            run_router(url, **options) as routing,
            routing.http() as http,
        ):
            assert http.post(PATH, json={**CHAT, "stream": True}).content == whole
            assert routing.engine(url).num_failures == 0


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
            chunk(b" " * 9999),
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"x" * 9999)),
        (HEAD, chunk(b": ping\n\n")),
    ],
    ids=["JSON", "bytes", "comments of a stream"],
)
def test_endless_answer_ends_at_request_timeout(begun, more):
    """This holds whether its client reads or not."""
    with (
        raw_engine(begun, "repeat", more=more) as (url, endless),
        run_router(url, request_timeout_s=3 * SHORT_S, max_answer_bytes=1 << 16) as routing,
        asking(routing, PATH, CHAT),
    ):
        wait_until(lambda: endless.num_left, "the engine hears of it")


def test_get_feed_ignores_request_timeout():
    """A dashboard reads its feed for as long as it is open."""
    feed = STREAM + chunk(EVENT) + b"0\r\n\r\n"
    with raw_engine(b"", "silent", get=feed) as (url, _):
        options = {"request_timeout_s": 1e-6, "engine_first_byte_timeout_s": 60.0}
        with run_router(url, **options) as routing, routing.http() as http:
            assert http.get("/dashboard/feed").content == 2 * EVENT
            assert http.post(PATH, json=CHAT).status_code == 504


def test_get_with_timeout_header_gets_504():
    with raw_engine(b"", get=b"HTTP/1.1 200 OK\r\n") as (url, _), run_router(url) as routing, routing.http() as http:
        answer = http.get("/dashboard/feed", headers={"X-Request-Timeout": str(SHORT_S)})
        assert error_of(answer) == (504, "request_timeout")


def test_deadline_does_not_end_finished_request():
    async def work(_now):
        routed = RoutedRequest(RequestSummary(), EVERYBODY)
        with routed.limited(TimeoutQueue(), 5.0):
            await asyncio.sleep(4.0)
        await asyncio.sleep(10.0)
        async with routed.guarded():
            pass
        with routed.limited(TimeoutQueue(), 5.0), pytest.raises(DeadlineError, match="its limit of 5 s"):
            async with routed.guarded():
                await asyncio.sleep(6.0)

    run_virtually(work)


def test_addresses_of_one_host_share_connect_timeout(monkeypatch):
    async def work(now):
        loop = asyncio.get_running_loop()
        tried = []

        async def found(*_, **__):
            await asyncio.sleep(2.0)
            return [(0, 0, 0, "", (f"10.0.0.{index}", 80)) for index in range(4)]

        async def connect(_factory, host, *_, **__):
            tried.append((host, now()))
            await asyncio.sleep(1e6)

        monkeypatch.setattr(loop, "getaddrinfo", found)
        monkeypatch.setattr(loop, "create_connection", connect)
        upstream = Upstream(RouterConfig(engines=("http://e:80",), engine_connect_timeout_s=10.0))
        scope = {"method": "POST", "raw_path": b"/", "query_string": b"", "headers": []}
        with pytest.raises(TimeoutError):
            await upstream.ask(EngineHandle("http://e:80"), scope, b"", "id")
        assert tried == [(f"10.0.0.{index}", pytest.approx(2.0 + 2.0 * index)) for index in range(4)]
        return now()

    assert run_virtually(work) == pytest.approx(10.0)


def test_slow_name_resolution_hits_connect_timeout(monkeypatch):
    async def work(now):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *_, **__: asyncio.sleep(1e6))
        with pytest.raises(TimeoutError):
            await Upstream(RouterConfig(engines=("http://e",), engine_connect_timeout_s=3.0))._connect("http://e")
        return now()

    assert run_virtually(work) == pytest.approx(3.0)


def test_first_byte_timeout_defaults_to_request_timeout():
    assert RouterConfig(engines=("http://e",), request_timeout_s=7200.0).engine_first_byte_timeout_s == 7200.0
    given = RouterConfig(engines=("http://e",), request_timeout_s=7200.0, engine_first_byte_timeout_s=60.0)
    assert given.engine_first_byte_timeout_s == 60.0


def test_request_timeout_defaults_to_longest_engine_limit_plus_margin():
    service = RouterService(RouterConfig(engines=("http://a", "http://b")))
    service.pool.change(["http://a", "http://b"])
    first, second = service.pool.engines.values()
    assert service.request_timeout_s == 1830.0, "engines that publish no limit"
    first.request_timeout_s, second.request_timeout_s = 7200.0, 60.0
    assert service.request_timeout_s == 7230.0
    assert [engine.ends_within_s for engine in (first, second)] == [7230.0, 90.0]
    second.request_timeout_s = None
    first.request_timeout_s = 60.0
    assert service.request_timeout_s == 1830.0
    given = RouterService(RouterConfig(engines=("http://a",), request_timeout_s=5.0))
    assert given.request_timeout_s == 5.0


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("published", "known"), [(7200, 7200.0), (0.5, 0.5), (0, 0.0), (-1, None), ("x", None), (None, None)]
)
def test_router_reads_published_request_timeout_of_engine(published, known):
    with scripted("decode") as (url, engine), run_router(url) as routing:
        routing.engine(url).request_timeout_s = 42.0
        engine.request_timeout = published
        wait_until(lambda: routing.engine(url).request_timeout_s == known, "it is read")


@pytest.mark.turn(12)
def test_engine_reports_timeout_before_router_default():
    """The engine reports its own timeout, because the router's default limit is later."""
    with (
        run_server(request_timeout_s=SHORT_S) as server,
        run_router(server.url) as routing,
        routing.http() as http,
    ):
        server.executor.gate.clear()
        answer = http.post(PATH, json={**CHAT, "model": "fake"})
        server.executor.gate.set()
        assert error_of(answer) == (504, "request_timeout")
        assert routing.service.request_timeout_s == SHORT_S + 30.0
        assert "deadline has passed" in answer.text, "the error is the engine's"


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_first_byte_timeout_follows_engine_limit_unless_configured(limit_s):
    async def work(now):
        engine = EngineHandle("http://e", request_timeout_s=7200.0)
        upstream = Upstream(RouterConfig(engines=("http://e",), request_timeout_s=limit_s))
        given = []

        async def ask(*told):
            given.append(told[-1].first_byte_s)

        upstream._ask = ask
        scope = {"method": "POST", "raw_path": b"/", "query_string": b"", "headers": []}
        await upstream.ask(engine, scope, b"", "id")
        assert given == [limit_s or 7230.0]

    run_virtually(work)


@pytest.mark.parametrize(
    "name",
    ["engine_connect_timeout_s", "engine_first_byte_timeout_s", "engine_idle_timeout_s", "request_timeout_s"],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_nonpositive_timeouts_and_sizes_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        RouterConfig(engines=("http://e",), **{name: value})
    with pytest.raises(ConfigError, match="max_answer_bytes"):
        RouterConfig(engines=("http://e",), max_answer_bytes=0)
