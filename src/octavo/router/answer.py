"""Parses an engine's HTTP answer as it arrives, within limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import httptools

from octavo.router.answer_headers import headers_for_client, retry_after_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo.router.connection import EngineConnection

_MAX_HEADER_BYTES = 64 << 10
_MAX_WAITING_BYTES = 256 << 10
_FINAL_STATUSES = range(200, 600)
_INTERIM_STATUSES = range(100, 200)
_EMPTY_STATUSES = frozenset({204, 304})
_EVENT_STREAM, _JSON_LINES = b"text/event-stream", b"application/x-ndjson"


class AnswerError(ConnectionError):
    """The answer was cut off."""


class MalformedAnswerError(AnswerError):
    """An answer is invalid or too large."""


class NoAnswerError(ConnectionResetError):
    """An engine closed a connection before it answered."""


class SilentEngineError(TimeoutError):
    """An answer did not begin or continue in time."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Limits of an answer.

    first_byte_s: Seconds from the request's end to the headers' end.
    idle_s: Seconds between pieces of the body.
    max_bytes: Largest body read as a whole.
    """

    first_byte_s: float
    idle_s: float
    max_bytes: int


class Answer:
    """An engine's answer, used in an `async with` block.

    The end of the block releases the connection, or closes it if the answer is incomplete. Time limits do not run while
    received bytes wait for the reader.
    """

    def __init__(self, connection: EngineConnection, limits: AnswerLimits, *, is_head: bool) -> None:
        self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._connection, self._limits, self._is_head = connection, limits, is_head
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()  # last time the body was taken, or reading paused or resumed
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._num_framing_bytes = 0
        self._is_begun = self.is_over = self.ends_with_connection = self._keeps_alive = False
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._num_waiting_bytes = 0
        self._is_reading, self._is_full = True, False
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        del self._parser  # breaks a reference cycle
        if self.is_over and self._keeps_alive:
            self._connection.release()
        else:
            self._connection.close()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers for the client, without a stream's length, because an error event may follow."""
        is_bodiless = self.status in _EMPTY_STATUSES and not self._is_head
        return headers_for_client(self._headers, self._connection.url, has_length=not (self.is_stream or is_bodiless))

    @property
    def is_stream(self) -> bool:
        """True for an uncompressed stream of events or lines."""
        return self.is_plain and self._content_type in {_EVENT_STREAM, _JSON_LINES}

    @property
    def is_plain(self) -> bool:
        """True if uncompressed."""
        return self._header(b"content-encoding").lower() in {b"", b"identity"}

    @property
    def is_of_lines(self) -> bool:
        """True if each event is a line."""
        return self._content_type == _JSON_LINES

    @property
    def is_json(self) -> bool:
        """True for JSON."""
        return self._content_type == b"application/json"

    @property
    def retry_after_s(self) -> float | None:
        """The `Retry-After` in seconds, if valid."""
        return retry_after_s(self._header(b"retry-after"))

    @property
    def _content_type(self) -> bytes:
        return self._header(b"content-type").partition(b";")[0].strip().lower()

    def _header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self._headers if name == wanted), b"")

    async def begin(self) -> None:
        """Wait for the headers. Raises `OSError`."""
        while not self._is_begun:
            await self._more()

    async def next(self) -> bytes:
        """Wait for the next part of the body. Return b"" at the end. Raises `OSError`."""
        while not self._pieces:
            if self.is_over:
                return b""
            await self._more()
        return self._taken()

    async def read(self) -> bytes:
        """Return the body. Raises `OSError`."""
        body, is_whole = await self.read_held()
        if not is_whole:
            raise MalformedAnswerError(f"its answer exceeds the limit of {self._limits.max_bytes} bytes")
        return body

    async def read_held(self) -> tuple[bytes, bool]:
        """Return (body, True), or (the body's start, False) if it is too large. Raises `OSError`."""
        pieces: list[bytes] = []
        num_bytes = 0
        while num_bytes <= self._limits.max_bytes:
            piece = await self.next()
            if not piece:
                return b"".join(pieces), True
            pieces.append(piece)
            num_bytes += len(piece)
        return b"".join(pieces), False

    async def relay(self, take: Callable[[bytes], bool], wait_for_space: Callable[[], Awaitable[None]]) -> None:
        """Pass the rest of the body to `take` as it arrives. Raises `OSError`, and errors of `take`.

        take: Returns False to have `wait_for_space` awaited before the next piece.
        """
        self._take = take
        try:
            self._hand_over()
            while self._is_full or self._error is not None or not self.is_over:
                if self._is_full:
                    await wait_for_space()
                    self._is_full = False
                    self._read_on(is_reading=True)
                    self._hand_over()
                else:
                    await self._more()
        finally:
            self._take = None

    def give_up(self) -> None:
        """Close the connection."""
        self._keeps_alive = False
        self._connection.close()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._timer = self._loop.call_at(self._silent_at, self._look)
        try:
            await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = None

    @property
    def _silent_at(self) -> float:
        return self._progress_at + (self._limits.idle_s if self._is_begun else self._limits.first_byte_s)

    def _look(self) -> None:
        if self._loop.time() < self._silent_at:
            self._timer = self._loop.call_at(self._silent_at, self._look)
            return
        what = f"its answer did not continue within {self._limits.idle_s:g} s"
        if not self._is_begun:
            what = f"no answer within {self._limits.first_byte_s:g} s"
        self._fail(SilentEngineError(what))
        self._wake()

    def _taken(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._num_waiting_bytes = 0
        self._progress_at = self._loop.time()
        if not self._is_reading:
            self._read_on(is_reading=True)
        return body

    def _read_on(self, *, is_reading: bool) -> None:
        self._is_reading = is_reading
        self._progress_at = self._loop.time()
        self._connection.read_on(is_reading=is_reading)

    def feed(self, data: bytes) -> None:
        """Parse bytes."""
        num_body_bytes = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_alive = False
            self._fail(MalformedAnswerError(f"its answer is not valid HTTP: {error}"))
        self._num_framing_bytes = self._num_framing_bytes + len(data) if self._num_body_bytes == num_body_bytes else 0
        if self._num_framing_bytes > _MAX_HEADER_BYTES:
            self._fail(MalformedAnswerError(f"its headers or chunk lines exceed {_MAX_HEADER_BYTES} bytes"))
        if self._take is not None:
            self._hand_over()
            if not (self._is_full or self.is_over or self._error is not None):
                return
        elif self._num_waiting_bytes > _MAX_WAITING_BYTES and self._is_reading:
            self._read_on(is_reading=False)
        self._wake()

    def _hand_over(self) -> None:
        if self._take is None or self._is_full or not self._pieces:
            return
        try:
            self._is_full = not self._take(self._taken())
        except Exception as error:  # noqa: BLE001 - raised by `relay`
            self._error = error
        if self._is_full:
            self._read_on(is_reading=False)

    def connection_lost(self, error: Exception | None) -> None:
        """Complete the answer if it ends with the connection. Otherwise fail the answer."""
        if self._is_begun and self.ends_with_connection and error is None:
            self.is_over = True
        elif not self._num_framing_bytes and not self._is_begun:
            self._fail(NoAnswerError(f"it closed the connection: {error}"))
        else:
            self._fail(AnswerError(f"its answer was cut off: {error}"))
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._error is None and not self.is_over:
            self._error = error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_message_begin(self) -> None:
        """Refuse a second answer."""
        if self.is_over:
            raise AnswerError("two answers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        if self._is_begun:  # trailers are ignored
            return
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            self._refuse(f"its headers exceed {_MAX_HEADER_BYTES} bytes")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Begin the answer, except after interim headers (status 1xx)."""
        self.status = self._parser.get_status_code()
        if self.status in _INTERIM_STATUSES:
            self._headers.clear()
            return
        if self.status not in _FINAL_STATUSES:
            self._refuse(f"its status is {self.status}, which is not a status of HTTP")
        coding = self._header(b"transfer-encoding").lower()
        if coding not in {b"", b"chunked"}:
            self._refuse(f"its Transfer-Encoding is {coding!r:.100}; only chunked can be read")
        length = self._header(b"content-length")
        if self.status == 204 and (coding or length.strip(b"0")):
            self._refuse("its status is 204, which has no body, but its headers announce one")
        self._is_begun = True
        self._progress_at = self._loop.time()
        self.is_over = self._is_head
        self._keeps_alive = self._parser.should_keep_alive() and not self._is_head
        self.ends_with_connection = not (coding or length or self._is_head or self.status in _EMPTY_STATUSES)

    def on_body(self, piece: bytes) -> None:
        """Store a piece."""
        if not self.is_over:
            self._pieces.append(piece)
            self._num_body_bytes += len(piece)
            self._num_waiting_bytes += len(piece)

    def on_message_complete(self) -> None:
        """End the answer."""
        self.is_over = self._is_begun

    def _refuse(self, why: str) -> None:
        self._fail(MalformedAnswerError(why))
        raise MalformedAnswerError(why)
