"""Requests that wait in the queue or are deferred until KV is available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.core.request_queue import RequestQueue
    from octavo.data.request import Request

MAX_DEFERRED_STEPS = 16  # maximum deferral, in steps that compute tokens


@dataclass(frozen=True, slots=True)
class _Deferred:
    request: Request
    is_pending: Callable[[], bool]
    until_step: int


class WaitingRequests:
    """Holds the queue and the deferred requests, which later return to the queue's front."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.num_tokens = 0
        self._deferred: dict[str, _Deferred] = {}
        self._never_deferred: set[str] = set()

    def __len__(self) -> int:
        return len(self.queue) + len(self._deferred)

    def __iter__(self) -> Iterator[Request]:
        yield from (deferred.request for deferred in self._deferred.values())
        yield from self.queue

    @property
    def num_deferred(self) -> int:
        """Number of deferred requests."""
        return len(self._deferred)

    @property
    def num_records(self) -> int:
        """Number of records."""
        return len(self) + len(self._never_deferred)

    def check_limits(self, request: Request, max_num_waiting: int | None, max_num_tokens: int | None) -> None:
        """Raise `QueueFullError` if the request would exceed a limit."""
        if max_num_waiting is not None and len(self) >= max_num_waiting:
            raise QueueFullError(
                f"the queue is full: {max_num_waiting} requests are waiting, which is the limit (max_num_waiting)"
            )
        if max_num_tokens is not None and self.num_tokens + request.num_tokens > max_num_tokens:
            raise QueueFullError(
                f"the queue is full: {self.num_tokens} tokens are waiting, and this request has "
                f"{request.num_tokens}; the limit is {max_num_tokens} (max_num_waiting_tokens)"
            )

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.queue.add_request(request)
        self.num_tokens += request.num_tokens

    def put_back(self, request: Request) -> None:
        """See `RequestQueue.prepend_request`."""
        self.queue.prepend_request(request)
        self.num_tokens += request.num_tokens

    def take(self) -> Request:
        """Remove and return the queue's first request."""
        request = self.queue.pop_request()
        self.num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Remove a request."""
        if self._deferred.pop(request.request_id, None) is None:
            self.queue.remove_request(request)
        self.num_tokens -= request.num_tokens

    def forget(self, request: Request) -> None:
        """Drop an ended request's records."""
        self._never_deferred.discard(request.request_id)

    def may_defer(self, request: Request) -> bool:
        """Return False if an earlier deferral of the request timed out."""
        return request.request_id not in self._never_deferred

    def defer(self, is_pending: Callable[[], bool], step: int) -> Request:
        """Defer the queue's first request while `is_pending()`, for at most `MAX_DEFERRED_STEPS` steps."""
        request = self.queue.pop_request()
        self._deferred[request.request_id] = _Deferred(request, is_pending, step + MAX_DEFERRED_STEPS)
        return request

    def resume_deferred(self, step: int) -> list[tuple[Request, bool]]:
        """Requeue deferred requests whose wait has ended. Return pairs (request, has timed out)."""
        returned = []
        # reversed, because each request is put at the front
        for deferred in reversed(list(self._deferred.values())):
            is_coming = deferred.is_pending()
            if is_coming and step < deferred.until_step:
                continue
            request = self._deferred.pop(deferred.request.request_id).request
            if is_coming:
                self._never_deferred.add(request.request_id)
            self.queue.prepend_request(request)
            returned.append((request, is_coming))
        return returned
