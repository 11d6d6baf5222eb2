"""Divides service fairly between tenants, with virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2. When a tenant starts to
wait, the tenant's counter is raised to the smallest counter of the waiting tenants.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from octavo.core.request_queue import PriorityRequestQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.data.request import Request


class ServiceCounters:
    """Counts each tenant's service in weighted tokens. Prompt tokens are charged on admission.

    Prefix hits and recomputed tokens are free. Callers divide the number of tokens by the tenant's weight.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.input_weight = input_weight
        self.output_weight = output_weight
        self._served: dict[str, float] = {}
        self.num_restarts = 0

    def served(self, tenant: str) -> float:
        """Return `tenant`'s counter."""
        return self._served.get(tenant, 0.0)

    def charge_input(self, tenant: str, num_tokens: float) -> None:
        """Charge prompt tokens."""
        self._served[tenant] = self._served.get(tenant, 0.0) + self.input_weight * num_tokens

    def charge_output(self, tenant: str, num_tokens: float) -> None:
        """Charge generated tokens."""
        self._served[tenant] = self._served.get(tenant, 0.0) + self.output_weight * num_tokens

    def lift(self, tenant: str, level: float) -> None:
        """Raise a counter to at least `level`."""
        self._served[tenant] = max(self.served(tenant), level)

    def forget_all(self) -> None:
        """Reset all counters. No requests may be open."""
        self._served.clear()
        self.num_restarts += 1

    def bound(self, longest_prompt: int, longest_output: int, max_num_seqs: int, least_weight: float = 1.0) -> float:
        """Return the largest possible difference between two waiting tenants' counters.

        It is the cost of the longest prompt and `max_num_seqs` longest outputs, divided by `least_weight`.
        """
        longest = self.input_weight * longest_prompt + self.output_weight * longest_output * max_num_seqs
        return longest / least_weight


class FairRequestQueue:
    """Serves the tenant with the smallest counter first.

    rank: Orders each tenant's requests, as in `PriorityRequestQueue`.
    """

    def __init__(
        self, counters: ServiceCounters | None = None, rank: Callable[[Request], tuple[float, ...]] | None = None
    ) -> None:
        self.counters = counters or ServiceCounters()
        self._rank = rank
        self._tenants: dict[str, PriorityRequestQueue] = {}
        self._heap: list[tuple[float, str]] = []  # (counter, tenant); outdated counters are too small
        self._in_heap: set[str] = set()
        self._last_level = 0.0
        self._num_restarts = 0
        self._size = 0

    def add_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._queue_of(request.tenant).add_request(request)
        self._size += 1

    def prepend_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._queue_of(request.tenant).prepend_request(request)
        self._size += 1

    def peek_request(self) -> Request:
        """See `RequestQueue`."""
        if not self._size:
            raise IndexError("peek into an empty queue")
        return self._tenants[self._next_tenant()].peek_request()

    def pop_request(self) -> Request:
        """See `RequestQueue`."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        queue = self._tenants[request.tenant]
        queue.remove_request(request)
        self._size -= 1
        if not queue:
            del self._tenants[request.tenant]
            self._last_level = self.counters.served(request.tenant)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._tenants, key=self.counters.served):
            yield from self._tenants[tenant]

    def _queue_of(self, tenant: str) -> PriorityRequestQueue:
        queue = self._tenants.get(tenant)
        if not self._tenants:
            self._restart()
        if queue is None:
            level = self.counters.served(self._next_tenant()) if self._tenants else self._last_level
            self.counters.lift(tenant, level)
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._heap, (self.counters.served(tenant), tenant))
            queue = self._tenants[tenant] = PriorityRequestQueue(self._rank)
        return queue

    def _restart(self) -> None:
        self._heap.clear()
        self._in_heap.clear()
        if self._num_restarts != self.counters.num_restarts:
            self._num_restarts = self.counters.num_restarts
            self._last_level = 0.0

    def _next_tenant(self) -> str:
        while True:
            level, tenant = self._heap[0]
            if tenant not in self._tenants:
                heapq.heappop(self._heap)
                self._in_heap.discard(tenant)
            elif level < self.counters.served(tenant):
                heapq.heapreplace(self._heap, (self.counters.served(tenant), tenant))
            else:
                return tenant
