"""Request queues."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.data.request import Request


class RequestQueue(Protocol):
    """A queue of requests with distinct ids."""

    def add_request(self, request: Request) -> None:
        """Insert a request after all equally important requests that arrived earlier."""
        ...

    def prepend_request(self, request: Request) -> None:
        """Put a request back before all equally important requests that arrived later."""
        ...

    def peek_request(self) -> Request:
        """Return the first request. Raises IndexError if the queue is empty."""
        ...

    def pop_request(self) -> Request:
        """Remove and return the first request. Raises IndexError if the queue is empty."""
        ...

    def remove_request(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is absent."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """Serves requests in the order of arrival."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Put a request back before the first request that arrived later."""
        ahead = list(takewhile(lambda other: other.arrival_index < request.arrival_index, self._requests.values()))
        self._requests[request.request_id] = request
        for each in (request, *reversed(ahead)):
            self._requests.move_to_end(each.request_id, last=False)

    def peek_request(self) -> Request:
        """See `RequestQueue`."""
        if not self._requests:
            raise IndexError("peek into an empty queue")
        return next(iter(self._requests.values()))

    def pop_request(self) -> Request:
        """See `RequestQueue`."""
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """Serves the smallest rank first, and equal ranks in the order of arrival.

    rank: Returns a request's rank, which must never change. Default: the priority number.
    """

    def __init__(self, rank: Callable[[Request], tuple[float, ...]] | None = None) -> None:
        self._rank = rank or (lambda request: (request.priority,))
        self._heap: list[tuple[tuple[float, ...], int, str]] = []
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request.arrival_index, request.request_id))

    def prepend_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """See `RequestQueue`."""
        self._drop_stale()
        if not self._heap:
            raise IndexError("peek into an empty queue")
        return self._requests[self._heap[0][2]]

    def pop_request(self) -> Request:
        """See `RequestQueue`."""
        request = self.peek_request()
        heapq.heappop(self._heap)
        return self._requests.pop(request.request_id)

    def remove_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: (self._rank(request), request.arrival_index)))

    def _drop_stale(self) -> None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_live(self, entry: tuple[tuple[float, ...], int, str]) -> bool:
        request = self._requests.get(entry[2])
        return request is not None and request.arrival_index == entry[1]
