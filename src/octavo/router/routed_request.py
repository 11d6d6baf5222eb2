"""Open requests."""

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
    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class RoutedRequest:
    """A request that other tasks can abort.

    is_begun: True after the first part of the answer was sent.
    """

    __slots__ = ("_task", "_why", "is_begun", "summary", "tenant")

    def __init__(self, summary: RequestSummary, tenant: Tenant) -> None:
        self.summary, self.tenant = summary, tenant
        self.is_begun = False
        self._task: asyncio.Task[object] | None = None
        self._why: Exception | None = None

    def end(self, why: Exception) -> None:
        """Abort with the error `why`, unless an abort is pending."""
        if self._why is None:
            self._why = why
            if self._task is not None:
                self._task.cancel()

    @contextlib.asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Run a block that `end` can abort with its error."""
        self._task = asyncio.current_task()
        try:
            self._raise()
            yield
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise  # not cancelled by `end`
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
        """Abort with `DeadlineError` after `timeout_s`."""
        if timeout_s is None:
            yield
            return
        error = DeadlineError(f"the request did not finish within its limit of {timeout_s:g} s")
        timeout = timeouts.call_later(timeout_s, lambda: self.end(error))
        try:
            yield
        finally:
            timeout.cancel()

    @contextlib.asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Abort with `ClientDisconnect` if the client disconnects."""
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
    """Adds a request's tokens to an engine's load during a `with` block."""

    __slots__ = ("_num_left", "_num_prompt", "_routed", "engine")

    def __init__(self, routed: RoutedRequest, engine: EngineHandle) -> None:
        self._routed, self.engine = routed, engine
        summary = routed.summary
        self._num_prompt, self._num_left = summary.num_tokens, summary.max_tokens * summary.num_streams

    def __enter__(self) -> Self:
        engine = self.engine
        num_tokens = self._num_prompt + self._num_left
        engine.routed_requests.add(self._routed)
        engine.open_tokens += num_tokens
        engine.num_sent_tokens += num_tokens
        engine.num_sent_prompt_tokens += self._num_prompt
        engine.num_requests += 1
        return self

    def note_returned(self, num_events: int) -> None:
        """Subtract one token per event from the load, and the prompt's tokens at the first event."""
        done = min(num_events, self._num_left)
        self._num_left -= done
        self.engine.open_tokens -= done + self._num_prompt
        self._num_prompt = 0

    def __exit__(self, *_: object) -> None:
        self.engine.open_tokens -= self._num_prompt + self._num_left
        self.engine.routed_requests.discard(self._routed)
