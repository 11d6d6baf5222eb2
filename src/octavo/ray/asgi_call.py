"""Calls an ASGI application in this process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from starlette.types import ASGIApp, Message

_Messages: TypeAlias = "asyncio.Queue[Message | Exception | None]"
_MAX_UNREAD_MESSAGES = 16  # then the application waits, as for a client that does not read


class Answer:
    """An application's answer to one request. is_event_stream: True for server-sent events."""

    def __init__(self, start: Message, messages: _Messages) -> None:
        self.status: int = start["status"]
        self.is_event_stream = dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
        self._messages = messages

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. Parts that have arrived together are one piece. Raises the application's exception."""
        more = True
        while more:
            piece, more = await self._part()
            while more and not self._messages.empty():
                part, more = await self._part()
                piece += part
            if piece:
                yield piece

    async def body(self) -> bytes:
        """Return the whole body. Raises the application's exception."""
        return b"".join([piece async for piece in self.pieces()])

    async def _part(self) -> tuple[bytes, bool]:
        message = await _next(self._messages)
        return message.get("body", b""), message.get("more_body", False)


@asynccontextmanager
async def posted(app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
    """Send a POST request with a JSON body. Yield the answer as soon as its status is known.

    At the end of the context the client disconnects, which aborts an incomplete answer. Raises the application's
    exception.
    """
    messages: _Messages = asyncio.Queue(_MAX_UNREAD_MESSAGES)
    is_sent, has_left = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message | Exception | None) -> None:
        if not has_left.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(_scope(path, body, headers), receive, send)
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await send(error)
        else:
            await send(None)

    running = asyncio.create_task(run())
    try:
        yield Answer(await _next(messages), messages)
    finally:
        has_left.set()
        while not messages.empty():  # the application may wait for space
            messages.get_nowait()
        await running


async def _next(messages: _Messages) -> Message:
    message = await messages.get()
    if isinstance(message, Exception):
        raise message
    assert message is not None, "the application ended before its answer was complete"
    return message


def _scope(path: str, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    fields = {**headers, "host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()],
        "client": None,
        "server": None,
        "state": {},
    }
