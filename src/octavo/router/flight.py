"""A request under way: the task that serves it, and whatever may end it from outside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from starlette.requests import ClientDisconnect

from octavo.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.types import Receive

    from octavo.http.tenants import Tenant
    from octavo.http.timeouts import TimeoutQueue
    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class Flight:
    """One request of a client. is_begun: its client has heard something.

    Whatever ends it is raised where it is served, in a block of `guarded`; the first that came counts.
    """

    __slots__ = ("_task", "_why", "asked", "is_begun", "tenant")

    def __init__(self, asked: Asked, tenant: Tenant) -> None:
        self.asked, self.tenant = asked, tenant
        self.is_begun = False
        self._task: asyncio.Task[object] | None = None
        self._why: Exception | None = None

    def end(self, why: Exception) -> None:
        """End what is done for it now."""
        if self._why is None:
            self._why = why
            if self._task is not None:
                self._task.cancel()

    @contextlib.asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Raise what ends it, inside of the block or where it begins."""
        self._task = asyncio.current_task()
        try:
            self._raise()
            yield
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise  # the whole process ends
            self._task.uncancel()
            self._raise()
        finally:
            self._task = None

    def _raise(self) -> None:
        if self._why is not None:
            why, self._why = self._why, None
            raise why

    @contextlib.contextmanager
    def limited(self, timeouts: TimeoutQueue, timeout_s: float | None) -> Iterator[None]:
        """Let it take so many seconds in the block, or any time if None; then it ends with `DeadlineError`."""
        if timeout_s is None:
            yield
            return
        error = DeadlineError(f"the request was not done within its limit of {timeout_s:g} s")
        timeout = timeouts.call_later(timeout_s, lambda: self.end(error))
        try:
            yield
        finally:
            timeout.cancel()

    @contextlib.asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Look whether its client leaves, until the block is left: then it ends with `ClientDisconnect`."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnect())


class Share:
    """What a request takes of an engine's load until it is over: what was sent less what came back."""

    __slots__ = ("_flight", "_num_left", "_num_prompt", "engine")

    def __init__(self, flight: Flight, engine: Engine) -> None:
        self._flight, self.engine = flight, engine
        asked = flight.asked
        self._num_prompt, self._num_left = asked.num_tokens, asked.max_tokens * asked.num_streams

    def __enter__(self) -> Self:
        engine = self.engine
        num_tokens = self._num_prompt + self._num_left
        engine.flights.add(self._flight)
        engine.open_tokens += num_tokens
        engine.num_sent_tokens += num_tokens
        engine.num_sent_prompt_tokens += self._num_prompt
        engine.num_requests += 1
        return self

    def came_back(self, num_events: int) -> None:
        """Count so many events of a stream, each about a token; with the first the prompt is done."""
        done = min(num_events, self._num_left)
        self._num_left -= done
        self.engine.open_tokens -= done + self._num_prompt
        self._num_prompt = 0

    def __exit__(self, *_: object) -> None:
        self.engine.open_tokens -= self._num_prompt + self._num_left
        self.engine.flights.discard(self._flight)
