"""Admits waiting requests."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.core.policy import is_prefill, num_tokens_to_schedule
from octavo.data import events
from octavo.data.events import WaitReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.core.core_state import CoreState
    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.core.lifecycle import RequestLifecycle
    from octavo.core.step_plan import StepPlan
    from octavo.data.request import Request


class Admitter:
    """Admits waiting requests."""

    def __init__(self, state: CoreState, lifecycle: RequestLifecycle) -> None:
        self.num_busy_steps = 0  # steps with tokens; limits deferrals
        self._state, self._lifecycle = state, lifecycle
        self._waiting_requests, self._emitter = state.waiting_requests, state.emitter
        self._blocked: tuple[str, WaitReason] | None = None

    def resume_deferred(self) -> None:
        """Requeue deferred requests whose wait has ended."""
        for request, timed_out in self._waiting_requests.resume_deferred(self.num_busy_steps):
            self._emitter.emit(events.RequestUnparked, request.request_id, timed_out)

    def has_seat(self) -> bool:
        """Return True if one more request may run. Loading and deferred requests count as running."""
        num_seated = len(self._state.running) + len(self._state.transfers) + self._waiting_requests.num_deferred
        return num_seated < self._state.config.max_num_seqs

    def admit(self, plan: StepPlan, before: Request | None) -> None:
        """Admit requests in order, until a request cannot start.

        before: If not None, admit only requests that are more important than this running request.
        """
        reason = WaitReason.PREEMPTING if plan.preempted else plan.held_up
        rank = self._state.policy.rank
        while self._waiting_requests.queue and reason is None:
            if before is not None and rank(self._waiting_requests.queue.peek_request()) > rank(before):
                return
            if not self.has_seat():
                reason = WaitReason.NO_SEAT
            elif plan.budget <= 0:
                reason, plan.is_short = WaitReason.NO_BUDGET, True
            else:
                reason = self._admit_next(plan)
            if reason is None:
                self._blocked = None
        plan.held_up = reason
        if self._waiting_requests.queue and reason is not None:
            self._note_blocked(self._waiting_requests.queue.peek_request(), reason)

    def _admit_next(self, plan: StepPlan) -> WaitReason | None:
        request = self._waiting_requests.queue.peek_request()
        computed = self._state.transfers.hand_over_hit(request, self._state.manager.get_computed_blocks(request))
        awaited = self._state.manager.prefix_cache.awaited_block(request, computed)
        if (
            awaited is not None
            and self._waiting_requests.may_defer(request)
            and self._may_wait_for(awaited[1], request)
        ):
            self._park(partial(self._state.manager.prefix_cache.is_being_computed, awaited[0]), awaited[1])
            return None
        reason = self._state.admission.refusal(request, computed, len(self._state.running))
        if reason is not None:
            return reason
        may_wait = request.expects_kv or self._waiting_requests.may_defer(request)
        num_external = self._state.transfers.num_external_tokens(request, computed, may_wait=may_wait)
        if num_external is None:
            self._park(partial(self._state.transfers.is_looking_up, request), None)
            return None
        if num_external:
            return self._start_load(request, computed, num_external, plan)
        return self._start_computing(request, computed, plan)

    def _start_computing(self, request: Request, computed: ComputedBlocks, plan: StepPlan) -> WaitReason | None:
        cost, budget, config = self._state.prompt_cost, plan.budget, self._state.config
        num_remaining, threshold = request.num_tokens - computed.num_tokens, config.long_prefill_token_threshold
        num_fitting, of_prompt = (
            cost.num_tokens_within(budget, computed.num_tokens),
            is_prefill(request, computed.num_tokens),
        )
        count = num_tokens_to_schedule(
            num_remaining,
            plan.within_prompt_budget(num_fitting, of_prompt=of_prompt),
            threshold=threshold,
            may_be_cut=config.enable_chunked_prefill,
            initial_budget=min(config.max_num_batched_tokens, config.max_batch_prefill_tokens or num_remaining),
        )
        if count <= 0:
            return WaitReason.NO_BUDGET
        block_ids = self._state.manager.allocate_slots(
            request, count, computed, num_reserved_tokens=self._state.admission.num_reserved_tokens(request)
        )
        if block_ids is None:
            return WaitReason.NO_BLOCKS
        self._lifecycle.admit(request, computed)
        surcharge = cost.surcharge(computed.num_tokens, count, budget)
        plan.give(request, count, surcharge, of_prompt=of_prompt)
        plan.is_short |= num_fitting < min(num_remaining, threshold or num_remaining)
        plan.has_admitted = True
        return None

    def _park(self, is_pending: Callable[[], bool], owner: str | None) -> None:
        request = self._waiting_requests.defer(is_pending, self.num_busy_steps)
        self._emitter.emit(events.RequestParked, request.request_id, owner)

    def _start_load(
        self, request: Request, computed: ComputedBlocks, num_external: int, plan: StepPlan
    ) -> WaitReason | None:
        num_reserved = self._state.admission.num_reserved_tokens(request)
        block_ids = self._state.manager.allocate_slots(
            request, num_external, computed, num_reserved_tokens=num_reserved, is_loaded=True
        )
        if block_ids is None:
            return WaitReason.NO_BLOCKS
        self._lifecycle.start_loading(request, computed)
        self._state.transfers.start_load(request, computed, num_external)
        plan.has_admitted = True
        return None

    def _may_wait_for(self, owner_id: str, request: Request) -> bool:
        rank = self._state.policy.rank
        return not self._state.policy.ranks_are_fixed or rank(self._state.requests[owner_id]) < rank(request)

    def _note_blocked(self, request: Request, reason: WaitReason) -> None:
        if self._blocked != (request.request_id, reason):
            self._blocked = (request.request_id, reason)
            self._emitter.emit(events.RequestBlocked, request.request_id, reason)
