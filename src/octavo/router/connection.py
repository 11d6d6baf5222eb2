"""A connection to an engine: an answer is parsed as it comes, and passed on from there, with no task between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import httptools

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_MAX_HEADER_BYTES = 64 << 10
_MAX_WAITING_BYTES = 256 << 10  # of a body that nobody takes yet: more stays in the system, and so in the engine
_FINAL_STATUS = 200  # below it an answer is yet to come
# RFC 9110, section 7.6.1; and what this server says itself.
_NOT_PASSED_BACK = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"x-request-id", b"date", b"server"),
    }
)

_EVENT_ENDS = {b"text/event-stream": b"\n\n", b"application/x-ndjson": b"\n"}  # by the type of a stream


class AnswerError(ConnectionError):
    """An engine's answer was cut, or is no HTTP."""


class NoAnswerError(ConnectionResetError):
    """An engine has ended a connection before it answered."""


class EngineConnection(asyncio.Protocol):
    """Carries one request after another to an engine's address.

    on_idle, on_lost: hear of it when it may be asked again, and when it is gone.
    """

    def __init__(
        self, url: str, on_idle: Callable[[EngineConnection], None], on_lost: Callable[[EngineConnection], None]
    ) -> None:
        self.url = url
        self._on_idle, self._on_lost = on_idle, on_lost
        self._answer: Answer | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio's is wider
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in what has come; what nobody has asked for ends the connection."""
        if self._answer is None:
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits for an answer."""
        self._on_lost(self)
        if self._answer is not None:
            self._answer.connection_lost(exc)

    @property
    def is_closing(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, *, is_head: bool) -> Answer:
        """Send a request; return its answer when the headers are there. Raises `OSError`."""
        answer = self._answer = Answer(self, is_head=is_head)
        try:
            self._transport.write(head)
            if body:
                self._transport.write(body)
            await answer.begin()
        except BaseException:
            self.close()
            raise
        return answer

    def read_on(self, *, is_reading: bool) -> None:
        """Read what comes, or leave it in the system."""
        if self._transport.is_closing():
            return
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def release(self) -> None:
        """Be ready for another request."""
        self._answer = None
        if not self._transport.is_closing():
            self._on_idle(self)

    def close(self) -> None:
        """End it at once: so an engine hears that an answer is not wanted any more."""
        self._answer = None
        self._transport.abort()


class Answer:
    """An engine's answer. Leaving its block gives the connection back, or ends it where the answer is not over."""

    def __init__(self, connection: EngineConnection, *, is_head: bool) -> None:
        self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._connection, self._is_head = connection, is_head
        self._parser = httptools.HttpResponseParser(self)
        self._num_header_bytes = 0
        self._is_begun = self.is_over = self._ends_with_connection = self._keeps_alive = False
        self._error: Exception | None = None
        self._pieces: list[bytes] = []  # of the body, not taken yet
        self._num_waiting_bytes = 0
        self._is_reading, self._is_full = True, False
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        del self._parser  # which holds this object
        if self.is_over and self._keeps_alive:
            self._connection.release()
        else:
            self._connection.close()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a client is told, in the form of ASGI.

        A stream's length is not, as its end may be another one; nor is the engine's address, where it redirects.
        """
        origin = self._connection.url.encode()
        named = (each.strip().lower() for each in self._header(b"connection").split(b","))
        dropped = _NOT_PASSED_BACK.union(named, {b"content-length"} if self.is_stream else ())
        return [
            (name, value.removeprefix(origin) if name == b"location" else value)
            for name, value in self._headers
            if name not in dropped
        ]

    @property
    def event_end(self) -> bytes:
        """What each event of a stream ends with; empty for an answer that is none."""
        return _EVENT_ENDS.get(self._header(b"content-type").partition(b";")[0].strip(), b"")

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return bool(self.event_end)

    @property
    def is_json(self) -> bool:
        """Whether it is JSON."""
        return self._header(b"content-type").startswith(b"application/json")

    @property
    def retry_after(self) -> str:
        """Its header of that name; empty where there is none."""
        return self._header(b"retry-after").decode("latin-1")

    def _header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self._headers if name == wanted), b"")

    async def begin(self) -> None:
        """Wait for the headers. Raises `OSError`."""
        while not self._is_begun:
            await self._more()

    async def next(self) -> bytes:
        """Return what of the body has come, as soon as anything has; b"" at the end. Raises `OSError`."""
        while not self._pieces:
            if self.is_over:
                return b""
            await self._more()
        return self._taken()

    async def read(self) -> bytes:
        """Return the whole body. Raises `OSError`."""
        pieces = []
        while piece := await self.next():
            pieces.append(piece)
        return b"".join(pieces)

    async def relay(self, take: Callable[[bytes], bool], room: Callable[[], Awaitable[None]]) -> None:
        """Have the rest of the body taken as it comes, in the call that reads it. Raises `OSError`.

        take: returns whether it takes more now; where it does not, nothing more is read until `room` has been awaited.
        What it raises is raised here.
        """
        self._take = take
        try:
            self._hand_over()
            while self._is_full or self._error is not None or not self.is_over:
                if self._is_full:
                    await room()
                    self._is_full = False
                    self._read_on(is_reading=True)
                    self._hand_over()
                else:
                    await self._more()
        finally:
            self._take = None

    async def _more(self) -> None:
        """Wait until something has changed."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _taken(self) -> bytes:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_waiting_bytes = 0
        if not self._is_reading:
            self._read_on(is_reading=True)
        return body

    def _read_on(self, *, is_reading: bool) -> None:
        self._is_reading = is_reading
        self._connection.read_on(is_reading=is_reading)

    def feed(self, data: bytes) -> None:
        """Parse what has come, and have it taken."""
        if not self._is_begun:
            self._num_header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_alive = False  # also where it stands behind the answer
            self._fail(AnswerError(f"it answers with what is no HTTP: {error}"))
        if not self._is_begun and self._num_header_bytes > _MAX_HEADER_BYTES:
            self._fail(AnswerError(f"its answer's headers exceed {_MAX_HEADER_BYTES} bytes"))
        if self._take is not None:
            self._hand_over()
            if not (self._is_full or self.is_over or self._error is not None):
                return  # nobody need be woken
        elif self._num_waiting_bytes > _MAX_WAITING_BYTES and self._is_reading:
            self._read_on(is_reading=False)
        self._wake()

    def _hand_over(self) -> None:
        """Have what has come taken, unless its taker is full."""
        if self._take is None or self._is_full or not self._pieces:
            return
        try:
            self._is_full = not self._take(self._taken())
        except Exception as error:  # noqa: BLE001 - raised where the answer is relayed
            self._error = error
        if self._is_full:
            self._read_on(is_reading=False)

    def connection_lost(self, error: Exception | None) -> None:
        """End with the connection: some answers do."""
        if self._is_begun and self._ends_with_connection and error is None:
            self.is_over = True
        elif not self._num_header_bytes:
            self._fail(NoAnswerError(f"it has ended the connection: {error}"))
        else:
            self._fail(AnswerError(f"its answer was cut: {error}"))
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._error is None and not self.is_over:
            self._error = error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the parser calls

    def on_message_begin(self) -> None:
        """Let nothing follow an answer."""
        if self.is_over:
            raise AnswerError("two answers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those behind a body (trailers) are left out."""
        if not self._is_begun:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Begin, unless another answer follows this one."""
        self.status = self._parser.get_status_code()
        if self.status < _FINAL_STATUS:
            self._headers.clear()
            return
        self._is_begun = True
        self.is_over = self._is_head  # whatever length is told
        self._keeps_alive = self._parser.should_keep_alive() and not self._is_head
        has_length = self._header(b"content-length") or self._header(b"transfer-encoding")
        self._ends_with_connection = not has_length

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if not self.is_over:
            self._pieces.append(piece)
            self._num_waiting_bytes += len(piece)

    def on_message_complete(self) -> None:
        """End."""
        self.is_over = self._is_begun
