"""Lets in one at a time on an event loop, tenants in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from octavo.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Gate:
    """Belongs to the event loop of those who pass it."""

    def __init__(self) -> None:
        self._turns = Turns(self)
        self._asked: deque[Callable[[], None]] = deque()
        self._is_taken = False

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and have it until the block ends."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._turns.submit(tenant, lambda: self._take(granted))
        try:
            self._let_in()
            await granted
            yield
        finally:
            if not ticket.cancel():  # else its turn never came
                self._is_taken = False
                self._let_in()

    def submit(self, run_next: Callable[[], None]) -> None:
        """Be what `Turns` runs on: this is called when nobody has a turn."""
        self._asked.append(run_next)

    def _let_in(self) -> None:
        while self._asked and not self._is_taken:
            self._asked.popleft()()

    def _take(self, granted: asyncio.Future[None]) -> None:
        self._is_taken = True
        if not granted.done():  # else who waited has left just now, and gives the turn back
            granted.set_result(None)
