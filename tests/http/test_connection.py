"""A client's connection without a socket, in virtual time: its timeouts, its limits and its errors."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
import uvicorn
from router.virtual_time import run_virtually
from uvicorn.server import ServerState

from octavo.http import connection
from octavo.http.connection import MAX_HEADER_BYTES, BoundedHttpProtocol
from octavo.http.listening import MAX_UNSENT_BYTES
from octavo.http.timeouts import TimeoutQueue

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
HEADERS_S, IDLE_S, READER_S = 10.0, 30.0, 20.0


class Socket:
    """A fake socket. taken: bytes that the client has acknowledged. under_way: bytes that it has not."""

    taken: int | None = 1000
    under_way = 0
    is_reset = False

    def __init__(self, client: Any) -> None:
        self._client = client

    def getsockname(self) -> Any:
        return "10.0.0.9", 80

    def getpeername(self) -> Any:
        if self._client is None:
            raise OSError
        return self._client


class Transport:
    """A fake transport that keeps the bytes."""

    def __init__(self, client: Any) -> None:
        self.sock, self.written, self.buffered, self.high = Socket(client), b"", 0, None
        self.closed, self.is_aborted = asyncio.Event(), False
        self.is_reading = True
        self._extra = {"socket": self.sock, "peername": client, "sockname": ("10.0.0.9", 80)}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._extra.get(name, default)

    def write(self, data: bytes) -> None:
        self.written += data

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def abort(self) -> None:
        self.is_aborted = True
        self.close()

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Server:
    """Connections of one server. release: event that lets /wait be answered. scopes: the scopes of all requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_connections: int = 100) -> None:
        monkeypatch.setattr(connection, "bytes_taken", lambda sock: sock.taken)
        monkeypatch.setattr(connection, "bytes_under_way", lambda sock: sock.under_way)
        monkeypatch.setattr(connection, "reset_when_closed", lambda sock: setattr(sock, "is_reset", True))
        self._config = uvicorn.Config(self._app, log_config=None, access_log=False, ws="none", interface="asgi3")
        self._state, self._queue = ServerState(), TimeoutQueue()
        self._max_connections = max_connections
        self.release = asyncio.Event()
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.refused: list[Any] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = b""
        while scope["path"] != "/early":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/wait":
            await self.release.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, client: Any = ("::ffff:1.2.3.4", 5)) -> tuple[BoundedHttpProtocol, Transport]:
        made = BoundedHttpProtocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            header_timeout_s=HEADERS_S,
            keep_alive_timeout_s=IDLE_S,
            idle_timeout_s=READER_S,
            max_connections=self._max_connections,
            timeouts=self._queue,
            on_refused=lambda client, error: self.refused.append((client, error.status)),
        )
        transport: Any = Transport(client)
        made.connection_made(transport)
        return made, transport


def statuses(transport: Transport) -> list[bytes]:
    return [part[:3] for part in transport.written.split(b"HTTP/1.1 ")[1:]]


async def closes_at(transport: Transport, now: Any) -> float:
    """Return the time at which a connection is closed."""
    async with asyncio.timeout(1000.0):
        await transport.closed.wait()
    return now()


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a test with a server in virtual time."""

    def run(work: Any, **options: Any) -> None:
        async def begin(now: Any) -> None:
            await work(Server(monkeypatch, **options), now)

        run_virtually(begin)

    return run


@pytest.mark.parametrize("sent", [b"", b"GET /x HT"])
def test_incomplete_first_headers_time_out(virtually: Any, sent: bytes) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        await asyncio.sleep(1.0)
        if sent:
            made.data_received(sent)
        assert await closes_at(transport, now) == pytest.approx(HEADERS_S, abs=0.3)
        assert transport.written == b""

    virtually(work)


def test_idle_connection_between_requests_has_longer_timeout(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET)
        await asyncio.sleep(IDLE_S - 1.0)
        made.data_received(GET)
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200", b"200"]
        assert await closes_at(transport, now) == pytest.approx(2 * IDLE_S - 1.0, abs=0.3)

    virtually(work)


def test_later_headers_time_out_from_their_first_byte(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET)
        await asyncio.sleep(5.0)
        made.data_received(b"GET /x")
        await asyncio.sleep(5.0)
        made.data_received(b" HTTP")  # more pieces do not extend the time
        assert await closes_at(transport, now) == pytest.approx(5.0 + HEADERS_S, abs=0.3)

    virtually(work)


def test_unread_body_has_header_timeout(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        made.data_received(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200"]
        assert await closes_at(transport, now) == pytest.approx(HEADERS_S, abs=0.3)
        made, transport = server.connect()
        begun_at = now()
        made.data_received(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        await asyncio.sleep(1.0)
        made.data_received(b"defghi")  # after this the connection is idle
        assert await closes_at(transport, now) - begun_at == pytest.approx(1.0 + IDLE_S, abs=0.3)

    virtually(work)


def test_slow_response_does_not_time_out(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(10 * IDLE_S)
        assert not transport.is_closed
        server.release.set()
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200"]

    virtually(work)


@pytest.mark.parametrize(("size", "fits"), [(MAX_HEADER_BYTES, True), (MAX_HEADER_BYTES + 1, False)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_headers_may_be_as_large_as_limit(virtually: Any, size: int, fits: bool, is_whole: bool) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        if is_whole:  # names, values and the path count
            request = b"GET /x HTTP/1.1\r\nHost: x\r\na: " + b"b" * (size - len("/xhostxa")) + b"\r\n\r\n"
        else:  # each byte counts
            request = b"GET /x HTTP/1.1\r\nHost: x\r\na: "
            request += b"b" * (size - len(request))
        made.data_received(request)
        await asyncio.sleep(1.0)
        assert statuses(transport) == ([b"200"] if fits and is_whole else [] if fits else [b"431"])
        assert transport.is_closed is not fits
        assert server.refused == ([] if fits else [(("1.2.3.4", 5), 431)])
        if not fits:
            head, _, body = transport.written.partition(b"\r\n\r\n")
            assert json.loads(body)["error"]["message"] == "the request's headers exceed the limit of 65536 bytes"
            assert b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body) in head

    virtually(work)


def test_headers_of_earlier_requests_do_not_count_toward_limit(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        large = b"GET /x HTTP/1.1\r\nHost: x\r\na: " + b"b" * 40_000
        for _ in range(3):
            made.data_received(large)
            made.data_received(b"\r\n\r\n")
            await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200"] * 3

    virtually(work)


def test_trailers_are_not_added_to_headers(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, _ = server.connect()
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        made.data_received(head + b"1\r\na\r\n0\r\nX-Late: 1\r\n\r\n")
        await asyncio.sleep(1.0)
        assert server.bodies == [b"a"]
        assert b"x-late" not in dict(server.scopes[0]["headers"])

    virtually(work)


def test_invalid_request_is_answered_400_and_closed(virtually: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(b"what is this?\r\n\r\n")
        assert statuses(transport) == [b"400"]
        assert transport.is_closed
        assert server.refused == [(("1.2.3.4", 5), 400)]

    caplog.set_level(logging.WARNING, "uvicorn.error")
    virtually(work)
    assert caplog.text.count("Invalid HTTP request received.") == 1


def test_oversized_headers_are_not_logged_as_invalid_request(virtually: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, _ = server.connect()
        made.data_received(b"GET /x HTTP/1.1\r\na: " + b"b" * MAX_HEADER_BYTES + b"\r\n\r\n")

    caplog.set_level(logging.WARNING, "uvicorn.error")
    virtually(work)
    assert "Invalid HTTP" not in caplog.text


def test_invalid_bytes_get_no_second_response_during_request(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(1.0)
        made.data_received(b"what is this?\r\n\r\n")
        assert statuses(transport) == [b"200"]
        assert (transport.is_closed, server.refused) == (True, [])
        made, transport = server.connect()
        made.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(1.0)
        made.data_received(b"no number\r\n")  # an error in the body of a request without an answer ends that request
        assert statuses(transport) == [b"400"]
        assert server.refused == []
        assert server.scopes[-1]["state"]["error"].status == 400

    virtually(work)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_protocol_upgrade_is_ignored(virtually: Any, protocol: bytes) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        head = b"POST /x?a=1 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: %b\r\n" % protocol
        made.data_received(head + b"Content-Length: 3\r\n\r\nabc" + GET)
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200", b"200"]
        assert server.bodies == [b"abc", b""]
        assert (server.scopes[0]["method"], server.scopes[0]["query_string"]) == ("POST", b"a=1")
        assert b"upgrade" not in dict(server.scopes[0]["headers"])

    virtually(work)


@pytest.mark.parametrize(("client", "expected"), [(("::ffff:1.2.3.4", 5), ("1.2.3.4", 5)), (("::1", 5), ("::1", 5))])
def test_ipv4_mapped_client_address_is_normalized(virtually: Any, client: Any, expected: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect(client)
        made.data_received(GET)
        await asyncio.sleep(1.0)
        assert server.scopes[0]["client"] == expected
        assert transport.high == MAX_UNSENT_BYTES

    virtually(work)


def test_client_without_address_is_served(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect(None)
        made.data_received(GET)
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200"]

    virtually(work)


# --- pipelined requests -------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order_and_reading_pauses(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(1.0)
        made.data_received(GET)
        assert transport.is_reading
        made.data_received(GET)
        assert not transport.is_reading
        await asyncio.sleep(2 * IDLE_S)
        assert (statuses(transport), transport.is_closed) == ([b"200"], False)
        server.release.set()
        released_at = now()
        await asyncio.sleep(1.0)
        assert statuses(transport) == [b"200"] * 3
        assert transport.is_reading
        assert await closes_at(transport, now) - released_at == pytest.approx(IDLE_S, abs=0.3)

    virtually(work)


def test_disconnect_ends_request_being_answered(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(1.0)
        made.data_received(GET)
        cycle = made._answered
        assert cycle is not None
        cycle.message_event.clear()
        transport.sock.under_way = 5000
        made.connection_lost(None)
        assert cycle.disconnected
        assert cycle.message_event.is_set()
        assert made._timer is None
        assert made._reader_timer is None
        await asyncio.sleep(2 * READER_S)
        assert not transport.is_aborted
        assert made._reader_timer is None

    virtually(work)


def test_request_after_connection_close_is_not_read(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(b"GET /x HTTP/1.1\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n" + GET)
        await asyncio.sleep(1.0)
        assert (statuses(transport), transport.is_closed) == ([b"200"], True)
        assert server.refused == []

    virtually(work)


# --- too many connections -----------------------------------------------------------------------------------------


def test_connections_beyond_limit_serve_only_health_probes(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        server.connect()
        made, transport = server.connect()
        made.data_received(GET)
        await asyncio.sleep(0.5)
        assert statuses(transport) == [b"503"]
        assert b"Retry-After: 1\r\n" in transport.written
        assert server.refused == [(("1.2.3.4", 5), 503)]
        made.connection_lost(None)
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/health?x"))
        await asyncio.sleep(0.5)
        assert statuses(transport) == [b"200"]
        assert b"connection: close\r\n" in transport.written
        assert transport.is_closed
        made.connection_lost(None)
        begun_at = now()
        made, transport = server.connect()
        assert await closes_at(transport, now) - begun_at == pytest.approx(2.0, abs=0.3)

    virtually(work, max_connections=1)


def test_silent_probe_connection_is_closed_for_new_probe(virtually: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, _now: Any) -> None:
        first, first_transport = server.connect()
        probe, probe_transport = server.connect()
        late, late_transport = server.connect()
        assert statuses(probe_transport) == [b"503"]
        assert probe_transport.is_closed
        assert not late_transport.written
        probe.connection_lost(None)
        late.data_received(b"GET /health")
        last, last_transport = server.connect()
        assert statuses(last_transport) == [b"503"]  # the request before it has started
        assert not late_transport.is_closed
        assert not first_transport.written
        assert not first.is_silent_probe
        assert last._is_for_probes

    monkeypatch.setattr(connection, "PROBE_CONNECTIONS", 1)
    virtually(work, max_connections=1)


# --- readers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "takes", "ends"),
    [
        (5000, 0, True),
        (5000, 4999, True),
        (5000, 5000, False),
        (100_000, MAX_UNSENT_BYTES - 1, True),
        (100_000, MAX_UNSENT_BYTES, False),
    ],
)
@pytest.mark.parametrize("is_here", [False, True])
def test_slow_reader_is_disconnected(
    virtually: Any, waiting: int, takes: int, ends: bool, is_here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The unread bytes are in the system's buffer, or in this process (`is_here`)."""

    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        transport.sock.under_way, transport.buffered = (0, waiting) if is_here else (waiting, 0)
        made.data_received(GET.replace(b"/x", b"/wait"))
        for _ in range(5):
            await asyncio.sleep(READER_S - 0.1 if now() == 0 else READER_S)
            if transport.is_aborted:
                break
            transport.sock.taken += takes
        assert transport.is_aborted is ends is transport.sock.is_reset
        if ends:
            assert now() == pytest.approx(2 * READER_S, abs=0.2)
        text = f"1.2.3.4 took {takes} of {waiting} waiting bytes within 20 s: its connection is closed"
        assert (text in caplog.text) is ends

    caplog.set_level(logging.INFO)
    virtually(work)


def test_slow_reader_without_address_is_logged_as_client(virtually: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect(None)
        transport.sock.under_way = 5000
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(2 * READER_S)
        assert transport.is_aborted
        assert "a client took 0 of 5000 waiting bytes" in caplog.text

    caplog.set_level(logging.INFO)
    virtually(work)


@pytest.mark.parametrize("taken", [None, 0])
def test_connection_without_acknowledged_byte_count_is_kept(virtually: Any, taken: int | None) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        transport.sock.taken, transport.sock.under_way = taken, 5000
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(10 * READER_S)
        assert not transport.is_aborted
        assert (made._reader_timer is None) is (taken is None)

    virtually(work)


def test_reader_timer_runs_only_with_unread_bytes(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET)
        await asyncio.sleep(2 * READER_S - IDLE_S / 2)
        assert made._reader_timer is None
        transport.sock.under_way = 100
        made.pause_writing()
        assert made._reader_timer is not None
        timer = made._reader_timer
        made.pause_writing()
        assert made._reader_timer is timer

    virtually(work)


def test_closing_connection_waits_limited_time_for_its_reader(virtually: Any) -> None:
    async def work(server: Server, now: Any) -> None:
        made, transport = server.connect()
        transport.sock.under_way = 5000
        begun_at = now()
        made.data_received(b"nonsense\r\n\r\n")
        await asyncio.sleep(READER_S + 0.1)
        assert transport.is_aborted
        assert now() - begun_at < READER_S + 1.0

    virtually(work)


def test_write_body_sends_chunks_and_reports_backpressure(virtually: Any) -> None:
    async def work(server: Server, _now: Any) -> None:
        made, transport = server.connect()
        made.data_received(GET.replace(b"/x", b"/wait"))
        await asyncio.sleep(1.0)
        write = server.scopes[0]["state"]["write_body"]
        before = len(transport.written)
        assert write(b"x" * 17)
        made.pause_writing()
        assert not write(b"y")
        assert transport.written[before:] == b"11\r\n" + b"x" * 17 + b"\r\n1\r\ny\r\n"
        transport.close()
        assert write(b"z")
        assert not transport.written.endswith(b"z\r\n")

    virtually(work)
