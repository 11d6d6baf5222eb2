"""Connections to engines: reuse, the bytes of a request, and the causes of failures."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace

import pytest
from router.virtual_time import run_virtually

from octavo.config import RouterConfig
from octavo.router.answer import NoAnswerError
from octavo.router.engines import EngineHandle
from octavo.router.upstream import Upstream, _headers, is_local_failure, is_refusal

URL = "http://10.0.0.1:8000"
IDLE_S = 30.0  # seconds for which an idle connection may be reused


class Connection:
    """A fake connection. It gives its answers in turn, and repeats the last one."""

    def __init__(self, *answers, url=URL):
        self.url, self.is_closing, self.is_closed = url, False, False
        self.answers, self.heads, self.bodies, self.limits = list(answers), [], [], []

    def close(self):
        self.is_closed = True

    async def ask(self, head, body, limits, *, is_head):
        self.heads.append(head)
        self.bodies.append(body)
        self.limits.append((limits, is_head))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def upstream_with(monkeypatch, *connections, **options):
    """Return an upstream that opens these connections in turn."""
    made = Upstream(RouterConfig(engines=(URL,), **options))
    left = list(connections)

    async def connect(url):
        connection = left.pop(0)
        assert connection.url == url
        return connection

    monkeypatch.setattr(made, "_connect", connect)
    return made


def scope_of(method="POST", headers=(), query=b"", client=("1.2.3.4", 5)):
    return {
        "method": method,
        "raw_path": b"/v1/x",
        "query_string": query,
        "headers": list(headers),
        "client": client,
    }


def test_latest_idle_connection_is_reused_and_expired_ones_close(monkeypatch):
    async def work(now):
        upstream = upstream_with(monkeypatch)
        first, second, third = (Connection() for _ in range(3))
        upstream._now_idle(first)
        await asyncio.sleep(IDLE_S - 1.0)
        upstream._now_idle(second)
        assert not first.is_closed
        assert upstream._take_idle(URL) is second
        await asyncio.sleep(2.0)
        upstream._now_idle(third)  # the first one is too old now
        assert (first.is_closed, third.is_closed) == (True, False)
        assert upstream._take_idle(URL) is third
        assert upstream._take_idle(URL) is None
        upstream._now_idle(third)
        await asyncio.sleep(now() and IDLE_S)
        assert upstream._take_idle(URL) is third

    run_virtually(work)


def test_expired_or_closing_connection_is_not_reused(monkeypatch):
    async def work(_now):
        upstream = upstream_with(monkeypatch)
        old, closing = Connection(), Connection()
        upstream._now_idle(old)
        await asyncio.sleep(IDLE_S + 0.5)
        assert upstream._take_idle(URL) is None
        assert old.is_closed
        upstream._now_idle(closing)
        closing.is_closing = True
        assert upstream._take_idle(URL) is None
        assert closing.is_closed
        assert upstream._take_idle("http://other") is None

    run_virtually(work)


def test_lost_connection_is_removed_from_pool(monkeypatch):
    async def work(_now):
        upstream = upstream_with(monkeypatch)
        one, two = Connection(), Connection()
        upstream._open |= {one, two}
        upstream._now_idle(one)
        upstream._now_idle(two)
        upstream._lost(two)
        assert (upstream._open, list(upstream._idle[URL])) == ({one}, [one])
        upstream._lost(one)
        assert (upstream._open, upstream._idle) == (set(), {})
        upstream._lost(one)
        upstream._open.add(two)
        await upstream.close()
        assert (one.is_closed, two.is_closed) == (False, True)

    run_virtually(work)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
@pytest.mark.parametrize("is_idle", [False, True])
def test_only_get_and_head_on_idle_connection_are_retried(monkeypatch, method, is_idle):
    async def work(_now):
        fails, works = Connection(NoAnswerError("closed")), Connection("answer")
        upstream = upstream_with(monkeypatch, *([] if is_idle else [fails]), works)
        if is_idle:
            upstream._now_idle(fails)
        summary = upstream._ask(URL, method, b"/", [], b"", None)
        if is_idle and method in {"GET", "HEAD"}:
            assert await summary == "answer"
            assert works.limits == [(None, method == "HEAD")]
        else:
            with pytest.raises(NoAnswerError):
                await summary
            assert not works.heads

    run_virtually(work)


@pytest.mark.parametrize(
    ("method", "body", "length"), [("GET", b"", None), ("GET", b"x", 1), ("POST", b"", 0), ("POST", b"abc", 3)]
)
def test_request_head_and_content_length_are_sent(monkeypatch, method, body, length):
    async def work(_now):
        connection = Connection("answer")
        upstream = upstream_with(monkeypatch, connection, engine_idle_timeout_s=11.0, engine_first_byte_timeout_s=7.0)
        scope = scope_of(method, [(b"accept", b"*/*")], query=b"a=1&b=2")
        assert await upstream.ask(EngineHandle(URL), scope, body, "id") == "answer"
        told = b"" if length is None else b"content-length: %d\r\n" % length
        expected = b"%b /v1/x?a=1&b=2 HTTP/1.1\r\nhost: 10.0.0.1:8000\r\naccept: */*\r\n" % method.encode()
        assert connection.heads == [expected + b"x-request-id: id\r\nx-forwarded-for: 1.2.3.4\r\n" + told + b"\r\n"]
        assert connection.bodies == [body]
        ((limits, is_head),) = connection.limits
        assert (limits.first_byte_s, limits.idle_s, is_head) == (7.0, 11.0, False)
        assert limits.max_bytes == RouterConfig(engines=(URL,)).max_answer_bytes

    run_virtually(work)


def test_first_byte_timeout_defaults_to_engine_limit(monkeypatch):
    async def work(_now):
        connection, engine = Connection("answer"), EngineHandle(URL, request_timeout_s=70.0)
        await upstream_with(monkeypatch, connection).ask(engine, scope_of(), b"", "id")
        ((limits, _),) = connection.limits
        assert limits.first_byte_s == engine.ends_within_s > 70.0
        assert b"/v1/x HTTP" in connection.heads[0]  # no question mark without a query

    run_virtually(work)


@pytest.mark.parametrize("key", [None, "secret"])
def test_router_get_sends_key_and_applies_limits(monkeypatch, key):
    class Answer(SimpleNamespace):
        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            self.is_left = True

        async def read(self):
            await asyncio.sleep(self.seconds)
            return b"text"

    async def work(now):
        answer = Answer(status=200, seconds=4.0)
        connection = Connection(answer)
        upstream = upstream_with(monkeypatch, connection, connection)
        assert await upstream.get(EngineHandle(URL), "/ready", key, 5.0) == (200, b"text")
        assert answer.is_left
        assert (b"authorization: Bearer secret\r\n" in connection.heads[0]) is (key is not None)
        ((limits, _),) = connection.limits
        assert (limits.first_byte_s, limits.idle_s, limits.max_bytes) == (5.0, 5.0, 16 << 20)
        answer.seconds = 6.0
        with pytest.raises(TimeoutError):
            await upstream.get(EngineHandle(URL), "/ready", key, 5.0)
        assert now() == pytest.approx(9.0)

    run_virtually(work)


def test_hop_by_hop_headers_are_not_forwarded():
    dropped = ("Connection", "keep-alive", "te", "transfer-encoding", "upgrade", "host", "origin", "content-length")
    headers = [(name.lower().encode(), b"X-Own , close") for name in dropped]
    headers += [(b"x-own", b"1"), (b"x-request-id", b"theirs"), (b"x-forwarded-for", b"9.9.9.9"), (b"x-other", b"2")]
    scope = scope_of(headers=headers)
    assert _headers(scope, "id") == [(b"x-other", b"2"), (b"x-request-id", b"id"), (b"x-forwarded-for", b"1.2.3.4")]
    assert _headers(scope_of(client=None), "id") == [(b"x-request-id", b"id")]


def test_engines_of_one_router_get_its_key_instead_of_clients():
    headers = [(b"authorization", b"Bearer theirs"), (b"x-api-key", b"theirs"), (b"x-other", b"2")]
    scope = scope_of(headers=headers, client=None)
    assert _headers(scope, "id", "own") == [
        (b"x-other", b"2"),
        (b"authorization", b"Bearer own"),
        (b"x-request-id", b"id"),
    ]
    assert _headers(scope, "id") == [*headers, (b"x-request-id", b"id")]


@pytest.mark.parametrize(
    ("error", "is_own", "is_refused"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "no answer of DNS"), True, False),
        *((OSError(number, "x"), True, False) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)),
        (OSError(errno.EADDRNOTAVAIL, "x"), True, False),
        (OSError(errno.EHOSTUNREACH, "x"), False, False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), False, True),
        (ConnectionResetError(), False, True),
        (TimeoutError(), False, False),
        (RuntimeError(), False, False),
    ],
)
def test_failures_are_classified_as_local_or_refused(error, is_own, is_refused):
    assert (is_local_failure(error), is_refusal(error)) == (is_own, is_refused)


class Loop:
    """Resolves names, and lets connections fail in turn. outcomes: None: success, a number: seconds until success."""

    def __init__(self, monkeypatch, *outcomes, addresses=3):
        self.outcomes, self.summary, self.resolved = list(outcomes), [], []
        self._addresses = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{index}", 80)) for index in range(addresses)]
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self._resolve)
        monkeypatch.setattr(loop, "create_connection", self._connect)

    async def _resolve(self, host, port, **_):
        self.resolved.append((host, port))
        return self._addresses

    async def _connect(self, make, host, port, *, ssl, server_hostname):
        self.summary.append((host, port, ssl is not None, server_hostname))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            await asyncio.sleep(outcome)
        make()


def test_addresses_of_host_are_tried_in_order(monkeypatch):
    async def work(_now):
        upstream = Upstream(RouterConfig(engines=(URL,)))
        loop = Loop(monkeypatch, OSError("no route"), None)
        connection = await upstream._connect("http://name")
        assert [host for host, *_ in loop.summary] == ["10.0.0.0", "10.0.0.1"]
        assert (loop.resolved, loop.summary[0][2:]) == ([("name", 80)], (False, None))
        assert upstream._open == {connection}
        loop = Loop(monkeypatch, *[OSError(str(index)) for index in range(3)])
        with pytest.raises(OSError, match="2"):
            await upstream._connect("http://name")
        assert upstream._open == {connection}

    run_virtually(work)


def test_slow_address_uses_only_its_share_of_connect_timeout(monkeypatch):
    async def work(now):
        upstream = Upstream(RouterConfig(engines=(URL,), engine_connect_timeout_s=9.0))
        loop = Loop(monkeypatch, 100.0, None)
        await upstream._connect("http://name")
        assert now() == pytest.approx(3.0)
        loop = Loop(monkeypatch, 100.0, 100.0, 100.0)
        with pytest.raises(TimeoutError):
            await upstream._connect("http://name")
        assert now() == pytest.approx(12.0)
        assert len(loop.summary) == 3

    run_virtually(work)


def test_idle_connections_of_one_engine_are_closed():
    async def work(_now):
        upstream = Upstream(RouterConfig(engines=(URL,)))
        mine, others = [Connection(), Connection()], Connection(url="http://other:80")
        for connection in (*mine, others):
            upstream._now_idle(connection)
        upstream.close_idle(URL)
        assert [connection.is_closed for connection in (*mine, others)] == [True, True, False]
        assert upstream._take_idle(URL) is None
        assert upstream._take_idle("http://other:80") is others
        upstream.close_idle(URL)

    run_virtually(work)


def test_tls_verifies_engine_host_name(monkeypatch):
    async def work(_now):
        upstream = Upstream(RouterConfig(engines=(URL,)))
        loop = Loop(monkeypatch, None, None)
        await upstream._connect("https://name")
        context = upstream._tls
        await upstream._connect("https://name:8443")
        assert upstream._tls is context is not None
        assert loop.resolved == [("name", 443), ("name", 8443)]
        assert loop.summary[0][2:] == (True, "name")

    run_virtually(work)
