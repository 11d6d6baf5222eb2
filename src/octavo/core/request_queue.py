"""Queues of waiting requests: who is next, in O(1) or O(log n); removal from the middle included (aborts)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.data.request import Request


class RequestQueue(Protocol):
    """A queue of requests with distinct ids. peek and pop of an empty queue raise IndexError."""

    def add_request(self, request: Request) -> None:
        """Put it at its place behind those that came before."""
        ...

    def prepend_request(self, request: Request) -> None:
        """Put it back at the front of its class: it was preempted."""
        ...

    def peek_request(self) -> Request:
        """Return the next one without taking it."""
        ...

    def pop_request(self) -> Request:
        """Take the next one."""
        ...

    def remove_request(self, request: Request) -> None:
        """Take this one from wherever it stands; KeyError when it is not here."""
        ...

    def __len__(self) -> int: ...

    def __bool__(self) -> bool: ...

    def __iter__(self) -> Iterator[Request]: ...


def insert_at_front(requests: OrderedDict[str, Request], request: Request) -> None:
    """Put a request that left a queue back to its front; who arrived earlier and is back, too, stays before it."""
    ahead = list(takewhile(lambda other: other.arrival_index < request.arrival_index, requests.values()))
    requests[request.request_id] = request
    for each in (request, *reversed(ahead)):
        requests.move_to_end(each.request_id, last=False)


class FCFSRequestQueue:
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """Put it at the end."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Put it at the front, behind nobody but those who came before it."""
        insert_at_front(self._requests, request)

    def peek_request(self) -> Request:
        """Return the first one without taking it."""
        if not self._requests:
            raise IndexError("peek into an empty queue")
        return next(iter(self._requests.values()))

    def pop_request(self) -> Request:
        """Take the first one."""
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        """Take this one from wherever it stands."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """The smallest rank first, by default lower priority number, then arrival. O(log n).

    Ranks never change, so nothing is ever sorted again; a removed entry is skipped when it surfaces.
    """

    def __init__(self, rank: Callable[[Request], tuple[float, ...]] | None = None) -> None:
        self._rank = rank or (lambda request: (request.priority,))
        self._heap: list[tuple[tuple[float, ...], int, str]] = []
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """Put it at its place."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request.arrival_index, request.request_id))

    def prepend_request(self, request: Request) -> None:
        """Put it back: its arrival places it before all of its class that still wait."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """Return the most important one without taking it."""
        self._drop_stale()
        if not self._heap:
            raise IndexError("peek into an empty queue")
        return self._requests[self._heap[0][2]]

    def pop_request(self) -> Request:
        """Take the most important one."""
        request = self.peek_request()
        heapq.heappop(self._heap)
        return self._requests.pop(request.request_id)

    def remove_request(self, request: Request) -> None:
        """Take this one from wherever it stands."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: (self._rank(request), request.arrival_index)))

    def _drop_stale(self) -> None:
        """Skip entries whose request left, or whose id came back as another arrival."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_live(self, entry: tuple[tuple[float, ...], int, str]) -> bool:
        request = self._requests.get(entry[2])
        return request is not None and request.arrival_index == entry[1]
