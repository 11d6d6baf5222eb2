"""A small fake engine that streams the events that a request asks for, and clients that read their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING

from running import DEADLINE_S

from octavo.http.listening import bind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Streams:
    """Writes `events` events of `size` bytes, in pieces of `piece` bytes. company: open streams to wait for."""

    def __init__(self) -> None:
        self.num_sent_bytes = self._num_begun = 0
        self._has_begun = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with (
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError),
            contextlib.closing(writer.transport),
        ):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(READY)
                    continue
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await self._stream(writer, **json.loads(await reader.readexactly(length)))

    async def _stream(
        self, writer: asyncio.StreamWriter, name: str, events: int, size: int, piece: int, company: int = 0
    ) -> None:
        writer.write(HEAD)
        async with self._has_begun:
            self._num_begun += 1
            self._has_begun.notify_all()
        left = b""
        for number in range(events):
            left += event(name, number, size)
            while len(left) >= piece or (left and number == events - 1):
                part, left = left[:piece], left[piece:]
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
                self.num_sent_bytes += len(part)
            if number == 0:
                async with self._has_begun:
                    await self._has_begun.wait_for(lambda: self._num_begun >= company)
        writer.write(b"0\r\n\r\n")


def event(name: str, number: int, size: int) -> bytes:
    """Return the bytes of an event."""
    return b"data: %b %d " % (name.encode(), number) + b"x" * size + b"\n\n"


class Raw:
    """Writes the same bytes to each POST. then: keep the connection, end it, stay silent, or repeat `more`.

    get: bytes for each GET of a path that starts with /dashboard.
    """

    def __init__(self, answer: bytes, then: str = "keep", *, more: bytes = b"", get: bytes = READY) -> None:
        self.answer, self.then, self.more, self.get = answer, then, more, get
        self.num_posts = self.num_left = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with (
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError),
            contextlib.closing(writer.transport),
        ):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(self.get if head.startswith(b"GET /dashboard") else READY)
                    continue
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
                self.num_posts += 1
                await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.answer)
        try:
            if self.then == "end":
                await writer.drain()
                writer.write_eof()
            while self.then == "repeat":
                writer.write(self.more)
                await writer.drain()
            if self.then != "keep":
                await reader.readexactly(1)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_left += 1
            raise


@contextlib.contextmanager
def raw_engine(
    answer: bytes, then: str = "keep", *, more: bytes = b"", get: bytes = READY
) -> Iterator[tuple[str, Raw]]:
    """Run one in a thread. Yield its address and the engine."""
    engine = Raw(answer, then, more=more, get=get)
    with _running(engine.serve) as url:
        yield url, engine


@contextlib.contextmanager
def stream_engine() -> Iterator[tuple[str, Streams]]:
    """Run one in a thread. Yield its address and the engine."""
    streams = Streams()
    with _running(streams.serve) as url:
        yield url, streams


@contextlib.contextmanager
def _running(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    sock = bind("127.0.0.1", 0)
    server = loop.run_until_complete(asyncio.start_server(serve, sock=sock, backlog=2048))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


def request(**body: object) -> bytes:
    """Return a request for a stream. body: the arguments of `Streams`."""
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content


def events_of(answer: bytes) -> list[bytes]:
    """Return the events of a chunked answer. Raises `ValueError` if one does not end with its chunk."""
    events: list[bytes] = []
    start = answer.index(b"\r\n\r\n", len(b"HTTP/1.1 200")) + 4
    while True:
        line = answer.index(b"\r\n", start)
        start, length = line + 2, int(answer[start:line], 16)
        if not length:
            return events
        chunk = answer[start : start + length]
        if not chunk.endswith(b"\n\n"):
            raise ValueError(f"cut: {chunk[-80:]!r}")
        events += [each + b"\n\n" for each in chunk.split(b"\n\n")[:-1]]
        start += length + 2


async def ask(url: str, **body: object) -> list[bytes]:
    """Return the events of one stream."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        writer.write(request(**body))
        return events_of(await reader.read())


async def ask_many(url: str, count: int, num_events: int) -> list[list[bytes]]:
    """Return the events of `count` streams, named `s0`, `s1` and so on, which are all open at the same time."""
    summary = {"events": num_events, "size": 20, "piece": 16, "company": count}
    async with asyncio.timeout(3 * DEADLINE_S):
        return await asyncio.gather(*(ask(url, name=f"s{index}", **summary) for index in range(count)))
