"""A request's output queue."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from octavo.errors import DeadlineError, OctavoError
from octavo.outputs import ErrorCode
from octavo.runtime.faults import log_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.outputs import RequestOutput

DEADLINE_GRACE_S = 1.0  # time after the deadline in which the engine must end the request


class OutputStream:
    """A queue of one request's outputs. The only reader runs on the event loop `loop`.

    accepted: Succeeds when the core accepts the request, and fails when the core refuses it.
    is_detached, num_delivered: Only the engine's thread uses these attributes.
    """

    def __init__(self, deadline: float | None, on_unread: Callable[[RequestOutput], None] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._on_unread = on_unread
        self._has_reader = True
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.is_detached = False
        self.num_delivered = self.num_read = 0
        self._outputs: deque[RequestOutput | OctavoError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            error = DeadlineError(ErrorCode.DEADLINE_PASSED.text)
            self._timer = self.loop.call_at(deadline + DEADLINE_GRACE_S, self.fail, error)

    def put(self, output: RequestOutput | OctavoError) -> None:
        """Add an output, or the error that ends the stream."""
        if not self._has_reader:
            self._report_unread(output)
            return
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput | OctavoError:
        """Wait for the next output or error."""
        while not self._outputs:
            self._waiter = self.loop.create_future()
            await self._waiter
        self.num_read += 1
        return self._outputs.popleft()

    def end(self, error: OctavoError) -> None:
        """Drop the unread outputs, and end the stream with an error."""
        self._drop_unread()
        self.put(error)
        self._has_reader = False

    def detach(self) -> None:
        """Drop unread and later outputs."""
        self._has_reader = False
        if self._timer is not None:
            self._timer.cancel()
        self._drop_unread()

    def fail(self, error: OctavoError) -> None:
        """Deliver an error immediately, even if the engine is busy."""
        if self.accepted.done():
            self.put(error)
        else:
            self.accepted.set_exception(error)

    def _drop_unread(self) -> None:
        while self._outputs:
            self._report_unread(self._outputs.popleft())

    def _report_unread(self, output: RequestOutput | OctavoError) -> None:
        if self._on_unread is None or isinstance(output, OctavoError):
            return
        try:
            self._on_unread(output)
        except Exception as error:  # noqa: BLE001 - the loop has to serve other requests
            log_fault(output.request_id, "its unread outputs were counted", error)
