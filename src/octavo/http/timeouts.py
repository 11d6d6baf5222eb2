"""Limits of time of many connections, acted on one after another: others are served between where many end at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SPACING_S = 0.002  # several times what a cut costs, with what its client costs who comes again


class Timeout:
    """Something that is done when its time is over, unless it is cancelled before."""

    __slots__ = ("_act", "_queue", "_timer")

    def __init__(self, timeouts: TimeoutQueue, seconds: float, act: Callable[[], object]) -> None:
        self._queue, self._act = timeouts, act
        self._timer = asyncio.get_running_loop().call_later(seconds, timeouts.take_in, self)

    def cancel(self) -> None:
        """Let nothing be done, also where its time is over and its turn has not come."""
        self._timer.cancel()
        self._queue.leave_out(self)

    def act(self) -> None:
        """Do it."""
        self._act()


class TimeoutQueue:
    """Acts on limits that are over: first come, first cut, at most one in a turn of the loop, `SPACING_S` apart.

    A cut thus comes late by at most as many times `SPACING_S` (or turns of the loop, where those take longer) as
    connections wait for theirs; each waits for one, and none that has ended keeps a turn. Used on one event loop only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Timeout, None] = OrderedDict()  # in the order in which their times were over
        self._is_pausing = False

    def call_later(self, seconds: float, act: Callable[[], object]) -> Timeout:
        """Act when a time is over; the cut that is returned can be cancelled."""
        return Timeout(self, seconds, act)

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Bound what is awaited inside. Raises `TimeoutError`."""
        async with asyncio.timeout(None) as limit:
            cut = self.call_later(seconds, lambda: limit.reschedule(0.0))
            try:
                yield
            finally:
                cut.cancel()

    def take_in(self, cut: Timeout) -> None:
        """Act on a cut whose time is over, in its turn."""
        self._waiting[cut] = None
        if not self._is_pausing:
            self._act_on_first()

    def leave_out(self, cut: Timeout) -> None:
        """Forget a cut, if it waits for its turn."""
        self._waiting.pop(cut, None)

    def _act_on_first(self) -> None:
        self._is_pausing = bool(self._waiting)
        if self._is_pausing:
            asyncio.get_running_loop().call_later(SPACING_S, self._act_on_first)
            cut, _ = self._waiting.popitem(last=False)
            cut.act()
