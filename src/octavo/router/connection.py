"""Connections to engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo.router.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.router.answer import AnswerLimits


class EngineConnection(asyncio.Protocol):
    """A connection to an engine. Passes received bytes to the current `Answer`.

    on_idle: Called when another request may be sent.
    """

    def __init__(
        self, url: str, on_idle: Callable[[EngineConnection], None], on_lost: Callable[[EngineConnection], None]
    ) -> None:
        self.url = url
        self._on_idle, self._on_lost = on_idle, on_lost
        self._answer: Answer | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the answer. If no request is open, close the connection."""
        if self._answer is None:
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the owner and the answer."""
        self._on_lost(self)
        if self._answer is not None:
            self._answer.connection_lost(exc)

    @property
    def is_closing(self) -> bool:
        """True while closing."""
        return self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, limits: AnswerLimits, *, is_head: bool) -> Answer:
        """Send a request and wait for the answer's headers. Raises `OSError`."""
        answer = self._answer = Answer(self, limits, is_head=is_head)
        try:
            self._transport.writelines((head, body))
            await answer.begin()
        except BaseException:
            self.close()
            raise
        return answer

    def read_on(self, *, is_reading: bool) -> None:
        """Pause or resume reading."""
        if self._transport.is_closing():
            return
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def release(self) -> None:
        """Allow another request."""
        self._answer = None
        if not self._transport.is_closing():
            self._on_idle(self)

    def close(self) -> None:
        """Close the connection."""
        self._answer = None
        self._transport.abort()
