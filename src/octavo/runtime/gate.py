"""A fair lock on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from octavo.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Gate:
    """A lock for coroutines of one event loop. Tenants take turns. Not thread-safe."""

    def __init__(self) -> None:
        self._turns = Turns(self)
        self._requested: deque[Callable[[], None]] = deque()
        self._is_taken = False

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold the lock during the block."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._turns.submit(tenant, lambda: self._take(granted))
        try:
            self._let_in()
            await granted
            yield
        finally:
            if not ticket.cancel():  # a cancelled turn never held the lock
                self._is_taken = False
                self._let_in()

    def submit(self, run_next: Callable[[], None]) -> None:
        """Run a callback of `Turns` once the lock is free."""
        self._requested.append(run_next)

    def _let_in(self) -> None:
        while self._requested and not self._is_taken:
            self._requested.popleft()()

    def _take(self, granted: asyncio.Future[None]) -> None:
        self._is_taken = True
        if not granted.done():  # if cancelled, `turn` releases the lock
            granted.set_result(None)
