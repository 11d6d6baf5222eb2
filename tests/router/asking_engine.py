"""A connection on which a request was sent, without an engine: a test decides the bytes that arrive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from octavo.router.answer import AnswerLimits
from octavo.router.connection import EngineConnection

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMITS = AnswerLimits(first_byte_s=60.0, idle_s=60.0, max_bytes=1 << 30)


class Transport:
    """A fake transport that keeps the written bytes."""

    def __init__(self) -> None:
        self.written, self.is_reading, self.is_closed = b"", True, False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.written += b"".join(pieces)

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def abort(self) -> None:
        self.is_closed = True


class RequestSummary:
    """A connection on which a request was sent."""

    def __init__(self, *, is_head: bool = False, limits: AnswerLimits = LIMITS) -> None:
        self.idle: list[EngineConnection] = []
        self.connection = EngineConnection("http://engine", self.idle.append, lambda _: None)
        self.transport: Any = Transport()
        self.connection.connection_made(self.transport)
        self.answer = asyncio.ensure_future(self.connection.ask(b"GET", b"", limits, is_head=is_head))

    async def gets(self, data: bytes, size: int, *, ends: bool = True) -> tuple[int, bytes]:
        """Receive `data` in pieces of `size` bytes, then, if `ends`, the connection's end. Return status and body."""
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(self.read())
        for start in range(0, len(data), size):
            self.connection.data_received(data[start : start + size])
        if ends:
            self.connection.connection_lost(None)
        return await reading

    async def read(self) -> tuple[int, bytes]:
        """Return status and body as soon as the answer is complete."""
        async with await self.answer as answer:
            return answer.status, await answer.read()
