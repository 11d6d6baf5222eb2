"""HTTP connections with limits that uvicorn lacks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.http.apis import OPENAI
from octavo.http.auth import OPEN_PATHS
from octavo.http.errors import HttpError, note_error
from octavo.http.listening import (
    MAX_UNSENT_BYTES,
    PROBE_CONNECTIONS,
    bytes_taken,
    bytes_under_way,
    reset_when_closed,
)

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from octavo.http.timeouts import Timeout, TimeoutQueue

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 << 10
_PROBES = frozenset(path.encode() for path in OPEN_PATHS)
_PROBE_TIMEOUT_S = 2.0
_TOO_MANY_CONNECTIONS = HttpError(503, "too many connections", "server_error", code="too_many_connections")
_HEADERS_TOO_LARGE = HttpError(431, f"the request's headers exceed the limit of {MAX_HEADER_BYTES} bytes")


class BoundedHttpProtocol(HttpToolsProtocol):
    """An HTTP/1.1 connection with time limits. Answers 431 if headers exceed `MAX_HEADER_BYTES`.

    header_timeout_s: Seconds from the first byte of a request's headers to their end. For the first request, the time
    begins with the connection.
    idle_timeout_s: Seconds in which the client must take `MAX_UNSENT_BYTES`, or all waiting bytes if these are fewer.
    max_connections: Further connections accept only health checks.
    on_refused: Called for each error that the application does not see.

    Pipelined requests are answered in order. The next request is read while an answer is sent, because only reading
    detects a disconnect. The header Upgrade is ignored (RFC 9110, section 7.8).
    """

    def __init__(
        self,
        *arguments: Any,
        header_timeout_s: float,
        keep_alive_timeout_s: float,
        idle_timeout_s: float,
        max_connections: int,
        timeouts: TimeoutQueue,
        on_refused: Callable[[tuple[str, int] | None, HttpError], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._queue = timeouts
        self._header_timeout_s, self._keep_alive_timeout_s = header_timeout_s, keep_alive_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._timer: Timeout | None = None
        self._reader_timer: Timeout | asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None  # answered now or last; `cycle` is the newest request
        self._num_header_bytes = 0
        self._is_in_body = self._made_progress = False
        self._is_for_probes = False
        self._refusal: HttpError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a timer."""
        super().connection_made(transport)
        if self.client is not None:  # a dual-stack socket adds a prefix to IPv4
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._is_for_probes = len(self.connections) > self._max_connections
        if len(self.connections) > self._max_connections + PROBE_CONNECTIONS:
            self._make_room_for_a_probe()
        self._wait(min(self._header_timeout_s, _PROBE_TIMEOUT_S) if self._is_for_probes else self._header_timeout_s)

    def _make_room_for_a_probe(self) -> None:
        others = (each for each in self.connections if each is not self and isinstance(each, BoundedHttpProtocol))
        next((each for each in others if each.is_silent_probe), self).refuse_and_close()

    @property
    def is_silent_probe(self) -> bool:
        """True if this connection is only for health checks, and nothing was received."""
        is_silent = self._answered is None and not self._num_header_bytes
        return self._is_for_probes and is_silent and not self.transport.is_closing()

    def refuse_and_close(self) -> None:
        """Refuse this connection."""
        self._refuse(_TOO_MANY_CONNECTIONS)
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and mark the current request as disconnected."""
        self._stop_waiting()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn marks only the newest request
            self._answered.disconnected = True
            self._answered.message_event.set()

    def pause_writing(self) -> None:
        """Start to check that the client reads."""
        super().pause_writing()
        self._watch_reader()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and limit headers."""
        self._made_progress = False
        self._parse(data)
        if not (self._is_in_body or self._made_progress or self.transport.is_closing()):
            if not self._num_header_bytes and self._timer is not None and self.cycle is not None:
                self._wait(self._header_timeout_s)
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refusal = _HEADERS_TOO_LARGE
                self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as upgrade:
                    if not self._wants_upgrade:
                        return
                    rest = rest[upgrade.args[0] :]
                    self._begin_without_upgrade()
                else:
                    return
        except httptools.HttpParserError:
            if self._refusal is None:
                self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")

    @property
    def _wants_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"  # CONNECT has no body

    def _begin_without_upgrade(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *lines, b"", b""]))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        if not self._is_in_body:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        if self._wants_upgrade:
            return
        self._stop_waiting()
        self._is_in_body = self._made_progress = True
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refusal = _HEADERS_TOO_LARGE
        elif self._is_for_probes and self.url.partition(b"?")[0] not in _PROBES:
            self._refusal = _TOO_MANY_CONNECTIONS
        if self._refusal is not None:
            raise ValueError("refused")  # the parser fails, and `_parse` answers
        super().on_headers_complete()
        self.scope["state"]["write_body"] = self.write_body
        if self._is_for_probes:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]
        if not self.pipeline:
            self._answered = self.cycle
            self._watch_reader()
        elif len(self.pipeline) == 1:
            self.flow.resume_reading()

    def write_body(self, piece: bytes) -> bool:
        """Write a piece of a chunked answer, faster than ASGI's `send`. Return False if too many bytes are unsent.

        After False, the caller must send an empty piece by ASGI's `send`, which waits until the client has read enough.
        """
        if self.transport.is_closing():  # `receive` reports the disconnect
            return True
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return not self.flow.write_paused

    def on_message_complete(self) -> None:
        """Expect another request."""
        if self._wants_upgrade:
            return
        super().on_message_complete()
        self._is_in_body, self._made_progress = False, True
        self._num_header_bytes = 0
        if self._timer is not None:  # the answer ended before the body
            self._wait(self._keep_alive_timeout_s)

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait."""
        if self.pipeline:
            self._answered, _ = self.pipeline[-1]
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing() and self.cycle.response_complete:  # no pipelined request
            is_begun = self._is_in_body or self._num_header_bytes
            self._wait(self._header_timeout_s if is_begun else self._keep_alive_timeout_s)
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid input with an error, and close the connection.

        No error is sent if the client could mistake it for another request's answer.
        """
        answered = self._answered
        is_its_body = answered is not None and self._is_in_body and answered.scope is self.scope
        if answered is None or (not answered.response_started if is_its_body else answered.response_complete):
            self._refuse(self._refusal or HttpError(400, msg), self.scope["state"] if is_its_body else None)
        self._close()

    def _refuse(self, error: HttpError, state: dict[str, Any] | None = None) -> None:
        if state is None:
            self._on_refused(self.client, error)
        else:
            note_error(state, error)
        body = msgspec.json.encode(OPENAI.error(error))
        headers = {**error.headers, "content-type": "application/json", "content-length": len(body)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + f"{lines}connection: close\r\n\r\n".encode() + body)

    def _close(self) -> None:
        self.transport.close()
        self._watch_reader()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self._queue.call_later(seconds, self._close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_reader(self) -> None:
        if self._reader_timer is not None:
            return
        sock = self.transport.get_extra_info("socket")
        before, waiting = bytes_taken(sock), self._num_waiting_bytes(sock)
        is_over = self._answered is None or self._answered.response_complete
        if before is None or (is_over and not waiting and not self.transport.is_closing()):
            return
        self._reader_timer = self.loop.call_later(self._idle_timeout_s, self._look_at_reader, sock, before, waiting)

    def _look_at_reader(self, sock: socket.socket, before: int, waiting: int) -> None:
        self._reader_timer = None
        after = bytes_taken(sock)
        # gVisor always reports 0. Linux itself closes a connection if the client acknowledges nothing.
        if not after or after - before >= min(waiting, MAX_UNSENT_BYTES) or not self._num_waiting_bytes(sock):
            self._watch_reader()
            return
        logger.info(
            "%s took %d of %d waiting bytes within %g s: its connection is closed",
            "a client" if self.client is None else self.client[0],
            after - before,
            waiting,
            self._idle_timeout_s,
        )
        self._reader_timer = self._queue.call_later(0.0, self._abort)

    def _num_waiting_bytes(self, sock: socket.socket) -> int:
        return bytes_under_way(sock) + self.transport.get_write_buffer_size()

    def _abort(self) -> None:
        reset_when_closed(self.transport.get_extra_info("socket"))
        self.transport.abort()


class PacedAnswers:
    """Middleware that sends each piece of a large body after the client has taken the previous pieces.

    So the keep-alive timeout does not start before almost the whole body has arrived. Streamed events are not split.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def send_paced(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) > MAX_UNSENT_BYTES and not message.get("more_body", False):
                last = (len(body) - 1) // MAX_UNSENT_BYTES * MAX_UNSENT_BYTES
                for start in range(0, last, MAX_UNSENT_BYTES):
                    piece = body[start : start + MAX_UNSENT_BYTES]
                    await send({"type": message["type"], "body": piece, "more_body": True})
                message = {**message, "body": body[last:]}
            await send(message)

        await self.app(scope, receive, send_paced)
