"""Timeouts of connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SPACING_S = 0.002  # several times the cost of a timeout


class Timeout:
    """A scheduled call."""

    __slots__ = ("_queue", "_timer", "act")

    def __init__(self, timeouts: TimeoutQueue, seconds: float, act: Callable[[], object]) -> None:
        self._queue, self.act = timeouts, act
        self._timer = asyncio.get_running_loop().call_later(seconds, timeouts.take_in, self)

    def cancel(self) -> None:
        """Prevent the call, even if its time has passed."""
        self._timer.cancel()
        self._queue.leave_out(self)


class TimeoutQueue:
    """Calls expired timeouts in order, `SPACING_S` apart. In between, the event loop serves connections.

    Used on one event loop only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Timeout, None] = OrderedDict()
        self._is_pausing = False

    def call_later(self, seconds: float, act: Callable[[], object]) -> Timeout:
        """Call `act` after `seconds`, and after timeouts that expired earlier."""
        return Timeout(self, seconds, act)

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Limit the block's time. Raises `TimeoutError`."""
        async with asyncio.timeout(None) as limit:
            cut = self.call_later(seconds, lambda: limit.reschedule(0.0))
            try:
                yield
            finally:
                cut.cancel()

    def take_in(self, cut: Timeout) -> None:
        """Queue an expired timeout."""
        self._waiting[cut] = None
        if not self._is_pausing:
            self._act_on_first()

    def leave_out(self, cut: Timeout) -> None:
        """Remove a timeout."""
        self._waiting.pop(cut, None)

    def _act_on_first(self) -> None:
        self._is_pausing = bool(self._waiting)
        if self._is_pausing:
            asyncio.get_running_loop().call_later(SPACING_S, self._act_on_first)
            cut, _ = self._waiting.popitem(last=False)
            cut.act()
