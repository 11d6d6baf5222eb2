"""Decides how many tokens each request gets in a step, without separate phases for prefill and decode.

A request's tokens are computed until `num_computed_tokens` equals `num_tokens` (prompt, output and drafts).
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

from octavo.core import invariants
from octavo.core.admitter import Admitter
from octavo.core.core_state import CoreState
from octavo.core.event_emitter import EventEmitter
from octavo.core.faults import Faults
from octavo.core.kv.cache_listener import NO_LISTENER, CacheListener
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv_connector import KVConnector, NullConnector
from octavo.core.lifecycle import RequestLifecycle
from octavo.core.policy import PLAIN_COST, choose_victim, is_prefill, num_tokens_to_schedule, should_swap
from octavo.core.result_processor import ResultProcessor
from octavo.core.scheduler_interface import map_blocks
from octavo.core.step_plan import StepPlan
from octavo.core.steps_in_flight import StepInFlight
from octavo.core.transfer_scheduler import KVTransferScheduler
from octavo.data import events
from octavo.data.events import WaitReason
from octavo.data.request import Request, RequestStatus
from octavo.errors import PromptTooLongError, RequestError
from octavo.outputs import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.config import CacheConfig, SchedulerConfig
    from octavo.core.request_queue import RequestQueue
    from octavo.data.events import EventSink
    from octavo.data.kv_groups import KVGroupSpec
    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.data.snapshot import BlockMap
    from octavo.outputs import EngineCoreOutput


IDLE_CHECK_INTERVAL_S = 10.0


class Scheduler:
    """Decides each step, and connects the objects of the core."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_blocks: int,  # of the first KV group
        max_model_len: int,
        clock: Callable[[], float],
        sink: EventSink | None = None,
        cache_keys: tuple[str, ...] = (),  # extra keys of all block hashes
        num_host_blocks: int = 0,
        bounded_groups: Sequence[KVGroupSpec] = (),
        connector: KVConnector | None = None,
        cache_listener: CacheListener = NO_LISTENER,
    ) -> None:
        self.config = scheduler_config = scheduler_config.resolved()
        self.max_model_len = max_model_len
        self._clock = clock
        self._num_steps = 0
        self._news: list[EngineCoreOutput] = []
        self._next_check = 0.0
        self._emitter = emitter = EventEmitter(sink or events.NullSink())
        self._emit = emitter.emit
        self.kv_cache_manager = manager = KVCacheManager(
            num_blocks,
            cache_config.block_size,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            cache_decoded_blocks=cache_config.cache_decoded_blocks,
            num_host_blocks=num_host_blocks,
            bounded_groups=bounded_groups,
            max_step_tokens=scheduler_config.max_num_batched_tokens,
            extra_keys=cache_keys,
            checkpoint_interval=cache_config.state_checkpoint_interval,
            emit=emitter.emit,
            listener=cache_listener,
        )
        self.faults = Faults(manager)
        self.transfers = KVTransferScheduler(connector or NullConnector(), manager, scheduler_config, emitter)
        self._state = state = CoreState(scheduler_config, manager, self.transfers, emitter)
        self.policy, self.batching, self.admission = state.policy, state.batching, state.admission
        self.requests, self.running, self.waiting_requests = state.requests, state.running, state.waiting_requests
        self._lifecycle = RequestLifecycle(state)
        self._admitter = Admitter(state, self._lifecycle)
        self._results = ResultProcessor(state, self._lifecycle)

    @property
    def waiting(self) -> RequestQueue:
        """The queue of waiting requests, without deferred requests."""
        return self.waiting_requests.queue

    def add_request(self, request: Request) -> None:
        """Queue a request. May lower its `max_total_tokens` to the limits of the model and the cache.

        Raises `RequestError` and changes nothing if the id is in use, the queue is full, the prompt is empty, or the
        request can never fit. After the prompt, one output token must fit, or none for embeddings. With reservations,
        all of `max_tokens` must fit.
        """
        self._emitter.now = self._clock()
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", parameter="request_id")
        if request.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        least = request.sampling_params.least_output_tokens
        PromptTooLongError.check(request.num_prompt_tokens, self.max_model_len, least_output_tokens=least)
        longest = min(request.max_total_tokens, self.max_model_len)
        asked, request.max_total_tokens = request.max_total_tokens, longest
        try:
            self.admission.check_fits(request)
            self.waiting_requests.check_limits(request, self.config.max_num_waiting, self.config.max_num_waiting_tokens)
        except RequestError:
            request.max_total_tokens = asked
            raise
        # The newest token has no KV, so one more token fits.
        request.max_total_tokens = min(longest, self.kv_cache_manager.capacity_tokens + 1)
        self._lifecycle.arrive(request)

    def abort_request(self, request_id: str) -> list[EngineCoreOutput]:
        """Abort a request. Ignores unknown ids."""
        return self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End requests, and return their last outputs. Ignores unknown ids."""
        assert status.is_finished
        self._emitter.now = self._clock()
        outputs = [self._lifecycle.end(self.requests[each], status) for each in request_ids if each in self.requests]
        self._lifecycle.drop_finished()
        return outputs

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        Under all policies except `fair`, a running prompt gets tokens after more important waiting requests. A step
        that preempts a request admits no request. While a step is in flight, `may_look_ahead()` must be True.
        """
        in_flight = self._state.in_flight
        assert self.config.async_scheduling or not in_flight.steps, "the result of the last step has not arrived"
        self._num_steps += 1
        self._emitter.step = self._num_steps
        self._emitter.now = self._clock()
        self._expire()
        self._admitter.resume_deferred()
        initial_budget = self.config.max_num_batched_tokens
        plan = StepPlan(initial_budget, self.config.max_batch_prefill_tokens or initial_budget)
        if not in_flight.steps:
            self._preempt_requested(plan)
            output = self._decide(plan, list(self.running))
        else:
            ending = in_flight.expect(self.requests)
            try:
                running = [request for request in self.running if request.request_id not in ending]
                output = self._decide(plan, running)
            finally:
                in_flight.forget()
        if not output.is_empty:
            in_flight.steps.append(StepInFlight(output, plan, self._emitter.now))
        return output

    @property
    def in_flight(self) -> SchedulerOutput | None:
        """The oldest scheduled step without a result, or None."""
        steps = self._state.in_flight.steps
        return steps[0].scheduled if steps else None

    def may_look_ahead(self) -> bool:
        """Return True if the next step can be decided before the step in flight has a result.

        The next step must then not preempt, so every KV group needs enough free blocks for the running requests.
        """
        is_allowed = self.config.async_scheduling and not self.faults.to_preempt
        if not (is_allowed and self._state.in_flight.is_foreseeable(self.requests)):
            return False
        manager, running = self.kv_cache_manager, self.running
        num_left = sum(request.num_tokens + 1 - request.num_computed_tokens for request in running)
        num_tokens = min(self.config.max_num_batched_tokens, num_left)
        return manager.has_free(len(running) + manager.num_blocks_for(num_tokens))

    def _decide(self, plan: StepPlan, running: list[Request]) -> SchedulerOutput:
        plan.held_up = self.admission.open_step(len(self.running), len(self.waiting))
        outranked = self._outranked()
        self.batching.fill(plan, running, outranked, self._grow_running, self._admitter.admit)
        self._record_outranked(plan, outranked)
        max_drafts = self._state.draft_policy.bound(plan.num_tokens, self.requests)
        output = self._state.builder.build(self._num_steps, plan, self.requests, max_drafts)
        self._admitter.num_busy_steps += bool(plan.num_tokens)
        self._emit_step(output)
        return output

    def _expire(self) -> None:
        now, lifecycle = self._emitter.now, self._lifecycle
        for request in lifecycle.expired(now):
            self._news.append(lifecycle.fail(request, ErrorCode.DEADLINE_PASSED))
            lifecycle.drop_finished()
        for request in self.transfers.expired(now):
            self.transfers.cancel(request, "expired")
            lifecycle.abandon_loading(request)

    def _preempt_requested(self, plan: StepPlan) -> None:
        for request_id in self.faults.to_preempt:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                self._preempt(request, request, plan, forced=True)
        self.faults.to_preempt = []

    def _outranked(self) -> list[Request]:
        if not self.policy.ranks_are_fixed or not self.waiting or not self._admitter.has_seat():
            return []
        rank = self.policy.rank
        first = bisect(self.running, rank(self.waiting.peek_request()), key=rank)
        return [request for request in self.running[first:] if is_prefill(request)]

    def _grow_running(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        num_after, running = len(requests), RequestStatus.RUNNING  # each later request keeps one token
        are_prompts_limited = self.config.max_batch_prefill_tokens is not None
        num_prompts_after = sum(map(is_prefill, requests)) if are_prompts_limited else 0
        for request in requests:
            num_after -= 1
            if num_prompts_after:
                num_prompts_after -= is_prefill(request)
            if request.status is not running or plan.budget <= 0:
                continue
            sequence, num_computed = request.sequence, request.num_computed_tokens
            num_remaining = len(sequence.token_ids) + len(request.spec_token_ids) - num_computed
            is_limited = are_prompts_limited and not sequence.num_output_tokens
            if num_remaining == 1 and num_computed < sequence.num_slots and not is_limited:
                plan.give(request, 1)
            else:
                num_without = max(num_prompts_after - plan.prompt_budget, 0)  # these later prompts get no token
                self._grow(plan, request, num_remaining, num_after - num_without)

    def _grow(self, plan: StepPlan, request: Request, num_remaining: int, num_kept: int) -> None:
        of_prompt, num_computed = is_prefill(request), request.num_computed_tokens
        cost = self._state.prompt_cost if of_prompt else PLAIN_COST
        most = min(num_remaining, self.config.long_prefill_token_threshold or num_remaining)
        while plan.within_prompt_budget(num_remaining, of_prompt=of_prompt):
            count = fitting = num_remaining
            budget = max(plan.budget - num_kept, 1)
            if count > 1:
                fitting = cost.num_tokens_within(budget, num_computed)
                count = num_tokens_to_schedule(
                    num_remaining,
                    plan.within_prompt_budget(fitting, of_prompt=of_prompt),
                    threshold=self.config.long_prefill_token_threshold,
                    may_be_cut=True,
                    initial_budget=self.config.max_num_batched_tokens,
                )
            if self.kv_cache_manager.allocate_slots(request, count) is not None:
                surcharge = cost.surcharge(num_computed, count, budget)
                plan.give(request, count, surcharge, of_prompt=of_prompt)
                plan.is_short |= fitting < most
                return
            if plan.has_admitted:
                return
            if self._state.in_flight.steps:
                self._note_stalled(request, plan)
                return
            victim = choose_victim(self.running, self.policy.rank, self.config.max_num_preemptions)
            if victim is None:
                self._stall(request, plan)
                return
            self._preempt(victim, request, plan)
            if victim is request:
                return

    def _preempt(self, victim: Request, beneficiary: Request, plan: StepPlan, *, forced: bool = False) -> None:
        plan.take_back(victim)
        manager, num_lost = self.kv_cache_manager, victim.num_computed_tokens
        swaps = should_swap(self.config, num_lost, manager.num_blocks_for(num_lost)) and manager.swap_out(victim)
        self._lifecycle.preempt(victim)
        plan.preempted[victim.request_id] = victim
        policy = "" if forced else self.config.policy.value
        self._emit(events.RequestPreempted, victim.request_id, beneficiary.request_id, num_lost, swaps, policy)

    def _stall(self, request: Request, plan: StepPlan) -> None:
        self._note_stalled(request, plan)
        if len(self.running) == 1 and not self.kv_cache_manager.num_transfers:
            self._news.append(self._lifecycle.end(request, RequestStatus.FINISHED_LENGTH_CAPPED))
            self._lifecycle.drop_finished()

    def _note_stalled(self, request: Request, plan: StepPlan) -> None:
        plan.held_up = WaitReason.NO_BLOCKS
        self._emit(events.RequestStalled, request.request_id)

    def _record_outranked(self, plan: StepPlan, outranked: list[Request]) -> None:
        for request in outranked:
            if request.request_id not in plan.num_tokens and request.status is RequestStatus.RUNNING:
                self._emit(events.RequestOutranked, request.request_id)

    def _emit_step(self, output: SchedulerOutput) -> None:
        if not output.num_scheduled_tokens:
            return
        self._emit(
            events.StepScheduled,
            output.num_scheduled_tokens,
            output.total_num_scheduled_tokens,
            *self.get_request_counts(),
            self.kv_cache_manager.pool.usage,
            self.batching.prefill_limit,
            self.kv_cache_manager.bounded_usage,
        )

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelOutput) -> list[EngineCoreOutput]:
        """Process the result of the oldest step in flight. Ignores results of other steps."""
        self._emitter.now = self._clock()
        step = self._state.in_flight.take(scheduled.step) if result.step == scheduled.step else None
        if step is None:
            self._emit(events.StaleResultDropped, f"result of step {result.step} in step {self._num_steps}")
            return []
        self._emitter.step = scheduled.step
        return self._take_news() + self._results.process(step, result)

    def fail_step(self, scheduled: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """End the oldest step's requests with an error, and preempt the requests of later steps in flight.

        Does nothing if `scheduled` is not the oldest step in flight.
        """
        self._emitter.now = self._clock()
        step = self._state.in_flight.take(scheduled.step)
        if step is None:
            return []
        self._emitter.step = scheduled.step
        return self._take_news() + self._results.fail(step, message)

    def _take_news(self) -> list[EngineCoreOutput]:
        outputs, self._news = self._news, []
        return outputs

    def has_work(self) -> bool:
        """Return True if another step is needed, for example to report endings to the worker."""
        state, transfers = self._state, self.transfers
        if self.requests or state.in_flight.steps or self._news or transfers.num_pending:
            return True
        return state.builder.are_notices_due and (state.builder.has_endings or transfers.has_work)

    def get_num_transfers(self) -> int:
        """Count pending transfers and lookups."""
        return self.transfers.num_pending

    def get_num_unfinished_requests(self) -> int:
        """Count unfinished requests."""
        return len(self.requests)

    def check_when_idle(self) -> list[invariants.Breach]:
        """If idle, check all invariants, at most every `IDLE_CHECK_INTERVAL_S` seconds. Return the broken invariants.

        Blocks with wrong bookkeeping are quarantined.
        """
        self._emitter.now = now = self._clock()
        if self.has_work() or now < self._next_check:
            return []
        self._next_check = now + IDLE_CHECK_INTERVAL_S
        breaches = invariants.check(self)
        for breach in breaches:
            fresh = invariants.quarantine(self, breach)
            self._emit(events.BlocksQuarantined, fresh, f"invariant {breach.invariant}: {breach.message}")
        return breaches

    @property
    def num_kept_records(self) -> int:
        """Number of records about requests."""
        num_at_worker = self._state.builder.num_records + self.transfers.num_records
        return num_at_worker + self.waiting_requests.num_records + self.kv_cache_manager.num_tracked_requests

    def get_request_counts(self) -> tuple[int, int]:
        """Count running and waiting requests. Loading requests count as waiting."""
        return len(self.running), len(self.waiting_requests) + len(self.transfers)

    def block_map(self) -> BlockMap:
        """See `map_blocks`."""
        return map_blocks(self)

    def reset_prefix_cache(self) -> bool:
        """See `BlockPool.reset`."""
        return self.kv_cache_manager.reset_prefix_cache()
