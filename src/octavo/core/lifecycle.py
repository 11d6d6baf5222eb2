"""The lifecycle of a request, from its arrival to its end.

A request's status says which list contains the request:
- WAITING, PREEMPTED: the waiting requests.
- RUNNING: the running requests. Ended requests remain in this list until `drop_finished` is called.
- WAITING_FOR_REMOTE_KVS: the transfers.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING

from octavo.data import events
from octavo.data.request import RequestStatus
from octavo.outputs import EngineCoreOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.core.core_state import CoreState
    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.data.request import Request


class RequestLifecycle:
    """Starts, preempts and ends requests."""

    def __init__(self, state: CoreState) -> None:
        self._state, self._emitter = state, state.emitter
        self._requests, self._running, self._waiting_requests = state.requests, state.running, state.waiting_requests
        self._num_arrivals = 0
        self._deadlines: list[tuple[float, int, str]] = []

    def arrive(self, request: Request) -> None:
        """Queue a request."""
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._state.manager.add_tables(request)
        if request.deadline is not None:
            self._note_deadline(request, request.deadline)
        num_ahead = len(self._waiting_requests)
        self._waiting_requests.add(request)
        self._state.transfers.request_added(request)
        self._emitter.emit(
            events.RequestQueued,
            request.request_id,
            request.num_prompt_tokens,
            request.priority,
            request.tenant,
            num_ahead,
            request.arrival_time,
        )

    def _note_deadline(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._deadlines, (deadline, request.arrival_index, request.request_id))
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            alive = {each.arrival_index for each in self._requests.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in alive]
            heapq.heapify(self._deadlines)

    def expired(self, now: float) -> Iterator[Request]:
        """Yield the open requests whose deadline has passed. A request is yielded only once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival_index, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.arrival_index == arrival_index:
                yield request

    def admit(self, request: Request, computed: ComputedBlocks) -> None:
        """Start the queue's first request."""
        self._waiting_requests.take()
        self._run(request, computed.num_tokens)
        self._state.admission.admitted(request)
        self._note_admitted(request, computed)

    def start_loading(self, request: Request, computed: ComputedBlocks) -> None:
        """Admit the queue's first request, which waits for a KV load until `end_loading`."""
        self._waiting_requests.take()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = computed.num_tokens
        self._state.admission.admitted(request)
        self._note_admitted(request, computed)

    def end_loading(self, request: Request, num_tokens: int) -> None:
        """Run a request after its KV load. num_tokens: Number of computed and loaded tokens."""
        self._run(request, num_tokens)
        self._state.manager.note_loaded(request)
        self._state.manager.commit(request)

    def abandon_loading(self, request: Request) -> None:
        """Requeue a request after a failed KV load."""
        self._state.admission.left(request)
        self._state.manager.release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self._waiting_requests.put_back(request)

    def _run(self, request: Request, num_computed_tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if self._state.policy.ranks_are_fixed:
            insort(self._running, request, key=self._state.policy.rank)
        else:
            self._running.append(request)

    def _note_admitted(self, request: Request, computed: ComputedBlocks) -> None:
        request_id, num_tokens, num_hit = request.request_id, request.num_tokens, computed.num_tokens
        num_host_tokens = self._state.manager.num_host_tokens(computed)
        resumed = request.admitted_time is not None
        if not resumed:
            request.admitted_time = self._emitter.now
            num_fresh = request.num_prompt_tokens - num_hit
            self._state.policy.counters.charge_input(request.tenant, max(num_fresh, 0) / request.tenant_weight)
            cache = self._state.manager.prefix_cache
            if cache.reads_cache(request):
                miss = cache.why_missed(request, computed)
                reason, position = (miss.reason, miss.position) if miss else (None, None)
                num_unusable = cache.num_unusable_tokens(request, computed)
                limit = computed.limit if num_unusable else (events.HitLimit.BLOCKS if miss else None)
                fields = num_tokens, num_hit, num_host_tokens, reason, position, limit, num_unusable
                self._emitter.emit(events.PrefixCacheQueried, request_id, *fields)
        if num_host_tokens:
            num_swapped_in = tuple(self._state.manager.num_swapped_in(request, computed))
            computing_s = self._state.transfers.computing_s(num_host_tokens)
            found = len(computed.host_blocks), num_host_tokens, computing_s, num_swapped_in
            self._emitter.emit(events.HostBlocksFound, request_id, *found)
        self._emitter.emit(events.RequestAdmitted, request_id, num_hit, num_tokens, resumed)

    def preempt(self, victim: Request) -> None:
        """Release a running request's blocks and requeue it. No step may be in flight."""
        self._state.manager.release(victim)
        self._running.remove(victim)
        self._state.admission.left(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        self._state.builder.preempted(victim.request_id)
        self._waiting_requests.put_back(victim)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request, and release all that the request holds. Call `drop_finished` before `running` is read."""
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            self._state.admission.left(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._state.admission.left(request)
            self._state.transfers.cancel(request, "cancelled")
        else:
            self._waiting_requests.remove(request)
        self._waiting_requests.forget(request)
        self._state.transfers.request_finished(request)
        request.status = status
        request.spec_token_ids = []
        self._state.manager.free(request)
        del self._requests[request_id]
        self._state.builder.finished(request_id)
        self._state.in_flight.leave(request_id)
        if not self._requests:
            self._state.policy.counters.forget_all()
        reason = status.finish_reason or ""
        self._emitter.emit(events.RequestFinished, request_id, reason, request.sequence.num_output_tokens)

    def end(self, request: Request, status: RequestStatus, error: str | None = None) -> EngineCoreOutput:
        """End a request. Return its last output."""
        self.finish(request, status)
        return EngineCoreOutput(request.request_id, finish_reason=status.finish_reason, error=error)

    def fail(self, request: Request, message: str) -> EngineCoreOutput:
        """End a request with an error."""
        return self.end(request, RequestStatus.FINISHED_ERROR, message)

    def drop_finished(self) -> None:
        """Remove ended requests from the running list."""
        self._running[:] = [request for request in self._running if request.status is RequestStatus.RUNNING]
