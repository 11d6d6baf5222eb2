"""Grow the running, admit the waiting. There is no prefill phase and no decode phase: computed tokens chase tokens.

A request has `num_tokens` (prompt, output and drafts) and `num_computed_tokens`; a step gives it some more. A decode is
a chunk of one, a prefix hit a head start, a preemption a step back.
"""

from __future__ import annotations

import heapq
from bisect import bisect, insort
from collections import defaultdict
from typing import TYPE_CHECKING

from octavo.core import invariants
from octavo.core.admission import create_admission
from octavo.core.kv_cache_manager import ComputedBlocks, KVCacheManager
from octavo.core.kv_connector import KVConnector, NullConnector, PendingLoads
from octavo.core.policy import (
    PLAIN_COST,
    PromptCost,
    choose_victim,
    create_batching,
    create_policy,
    is_prefill,
    num_tokens_to_schedule,
    should_swap,
)
from octavo.core.scheduler_interface import SchedulerStats
from octavo.core.step_plan import StepPlan
from octavo.core.stop import check_stop
from octavo.core.waiting_room import WaitingRoom
from octavo.data import events
from octavo.data.events import WaitReason
from octavo.data.glimpse import BlockMap
from octavo.data.request import Request, RequestStatus
from octavo.data.scheduler_output import CachedRequestData, KVLoad, NewRequestData, SchedulerOutput
from octavo.errors import PromptTooLongError, QueueFullError, RequestError
from octavo.outputs import DEADLINE_PASSED, EngineCoreOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.config import CacheConfig, SchedulerConfig
    from octavo.core.kv_connector import PendingLoad
    from octavo.core.request_queue import RequestQueue
    from octavo.data.events import EventSink
    from octavo.data.model_output import ModelOutput, TokenLogprobs


IDLE_CHECK_INTERVAL_S = 10.0


class Scheduler:
    """Owns the status and counters of every request; blocks belong to the `KVCacheManager` it asks.

    num_host_blocks: room in host memory for the KV of preempted requests. connector: a store of KV outside.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        clock: Callable[[], float],
        sink: EventSink | None = None,
        cache_keys: tuple[str, ...] = (),
        num_host_blocks: int = 0,
        connector: KVConnector | None = None,
    ) -> None:
        self.config = scheduler_config
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = events.EventCounters()
        self.policy = create_policy(scheduler_config)
        self.room = WaitingRoom(self.policy.waiting)
        self.loads = PendingLoads()
        self._sink = events.FanOut([self.counters, sink or events.NullSink()])
        self._clock = clock
        self._now = self._step_start = 0.0
        self._step = 0
        self._open_step: int | None = None
        self._num_busy_steps = 0
        self._num_arrivals = 0
        self._num_sent_tokens: dict[str, int] = {}
        self._finished_req_ids: set[str] = set()
        self._news: list[EngineCoreOutput] = []
        self._deadlines: list[tuple[float, int, str]] = []
        self._blocked: tuple[str, WaitReason] | None = None
        self._connector = connector or NullConnector()
        self._gave_up_loading: set[str] = set()
        self._cancels: list[int] = []
        self._to_preempt: list[str] = []
        self._next_check = 0.0
        self.kv_cache_manager = KVCacheManager(
            num_blocks,
            cache_config.block_size,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            cache_decoded_blocks=cache_config.cache_decoded_blocks,
            num_host_blocks=num_host_blocks,
            extra_keys=cache_keys,
            on_cached=lambda block_id: self._emit(events.BlockCached, block_id),
            on_evict=lambda block_id: self._emit(events.BlockEvicted, block_id),
        )
        self.admission = create_admission(scheduler_config, self.kv_cache_manager)
        self._batching = create_batching(scheduler_config)
        self._prompt_cost = PromptCost(scheduler_config.attention_cost_tokens or 0.0)

    @property
    def has_connector(self) -> bool:
        """Whether there is a store of KV outside."""
        return not isinstance(self._connector, NullConnector)

    @property
    def waiting(self) -> RequestQueue:
        """The queue; who waits beside it for a block or for KV from outside is not in it."""
        return self.room.queue

    # --- arrivals and endings -----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Accept a request into the queue.

        Raises `RequestError` for an id in use, a full queue, or a request that could never fit: its prompt and one
        more token must fit the model's length and an empty cache. Nothing changes then.
        """
        self._now = self._clock()
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", parameter="request_id")
        self._check_length(request)
        longest = min(request.max_total_tokens, self.max_model_len)
        # The newest token needs no slot until it is fed back: one more than the capacity can be produced.
        asked, request.max_total_tokens = request.max_total_tokens, longest
        try:
            self.admission.check_fits(request)
            self._check_queue(request)
        except RequestError:
            request.max_total_tokens = asked
            raise
        request.max_total_tokens = min(longest, self.kv_cache_manager.capacity_tokens + 1)
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        if request.deadline is not None:
            self._note_deadline(request, request.deadline)
        num_ahead = len(self.room)
        self.room.add(request)
        self._emit(
            events.RequestQueued,
            request.request_id,
            request.num_prompt_tokens,
            request.priority,
            request.tenant,
            num_ahead,
            request.arrival_time,
        )

    def _note_deadline(self, request: Request, deadline: float) -> None:
        """Keep a deadline; those of requests that ended are dropped when they are the most."""
        heapq.heappush(self._deadlines, (deadline, request.arrival_index, request.request_id))
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            alive = {each.arrival_index for each in self.requests.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in alive]
            heapq.heapify(self._deadlines)

    def _check_length(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        PromptTooLongError.check(num_prompt, self.max_model_len)

    def _check_queue(self, request: Request) -> None:
        limit = self.config.max_num_waiting
        if limit is not None and len(self.room) >= limit:
            raise QueueFullError(f"the queue is full: {limit} requests wait already (max_num_waiting)")
        limit = self.config.max_num_waiting_tokens
        if limit is not None and self.room.num_tokens + request.num_tokens > limit:
            raise QueueFullError(
                f"the queue is full: {self.room.num_tokens} tokens wait already, and this request has "
                f"{request.num_tokens}; the limit is {limit} (max_num_waiting_tokens)"
            )

    def abort_request(self, request_id: str) -> list[EngineCoreOutput]:
        """End one request at the user's wish, in any state; unknown and finished ids are passed over."""
        return self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End requests from outside: their blocks are free at once, the worker hears of it with the next step."""
        assert status.is_finished
        self._now = self._clock()
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                outputs.append(EngineCoreOutput(request_id, finish_reason=status.finish_reason))
        self._drop_finished()
        return outputs

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """The one place where a request ends; call `_drop_finished` before the running are looked at again."""
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            self.admission.left(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.admission.left(request)
            self._cancel_load(request_id, "cancelled")
        else:
            self.room.remove(request)
        self.room.forget(request)
        self._gave_up_loading.discard(request_id)
        self._connector.request_finished(request, list(request.sequence.block_table))
        request.status = status
        request.spec_token_ids = []
        self.kv_cache_manager.free(request)
        del self.requests[request_id]
        self._num_sent_tokens.pop(request_id, None)
        self._finished_req_ids.add(request_id)
        if not self.requests:
            self.policy.counters.forget_all()
        reason = status.finish_reason or ""
        self._emit(events.RequestFinished, request_id, reason, request.sequence.num_output_tokens)

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _expire(self) -> None:
        """End requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= self._now:
            _, arrival_index, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.arrival_index == arrival_index:
                self._news.append(self._fail(request, DEADLINE_PASSED))
                self._drop_finished()

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide who gets how many tokens of the next step: the running first, then the waiting in order.

        Only a prompt that runs gives way to a more important newcomer, where ranks are fixed.
        Nobody is admitted in a step that preempted somebody, and nobody is preempted in one that admitted somebody.
        """
        self._step += 1
        self._open_step = self._step
        self._now = self._step_start = self._clock()
        self._expire()
        self._expire_loads()
        self._return_parked()
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._preempt_as_told(plan)
        plan.held_up = self.admission.open_step(len(self.running), len(self.waiting))
        outranked = self._outranked()
        self._batching.fill(plan, list(self.running), outranked, self._grow_running, self._admit_waiting)
        self._tell_outranked(plan, outranked)
        output = self._make_output(plan)
        self._num_busy_steps += bool(plan.num_tokens)
        self._emit_step(output)
        return output

    def _has_seat(self) -> bool:
        return len(self.running) + len(self.loads) + self.room.num_parked < self.config.max_num_seqs

    def _outranked(self) -> list[Request]:
        """Return the running prompts that give way to the more important head of the queue, in order of rank."""
        if not self.policy.ranks_are_fixed or not self.waiting or not self._has_seat():
            return []
        rank = self.policy.rank
        first = bisect(self.running, rank(self.waiting.peek_request()), key=rank)
        return [request for request in self.running[first:] if is_prefill(request)]

    def _tell_outranked(self, plan: StepPlan, outranked: list[Request]) -> None:
        for request in outranked:
            if request.request_id not in plan.num_tokens and request.status is RequestStatus.RUNNING:
                self._emit(events.RequestOutranked, request.request_id)

    def _grow_running(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Give each running request its next tokens; keep one of the budget for everyone who comes after it."""
        num_after, running = len(requests), RequestStatus.RUNNING
        for request in requests:
            num_after -= 1
            if request.status is not running or plan.budget <= 0:
                continue  # it fell victim to one before it, or gave way
            self._grow(plan, request, num_after)

    def _grow(self, plan: StepPlan, request: Request, num_after: int) -> None:
        """Give a running request its next tokens, and blocks for them at the cost of others where none are free."""
        sequence, num_computed = request.sequence, request.num_computed_tokens
        num_remaining = len(sequence.token_ids) + len(request.spec_token_ids) - num_computed
        if num_remaining == 1 and num_computed < len(sequence.block_table) * self.kv_cache_manager.block_size:
            plan.give(request, 1, [])  # the usual case: one more token, into a block that it has
            return
        cost = self._prompt_cost if is_prefill(request) else PLAIN_COST
        most = min(num_remaining, self.config.long_prefill_token_threshold or num_remaining)
        while True:
            count, budget = num_remaining, max(plan.budget - num_after, 1)
            if count > 1:
                count = num_tokens_to_schedule(
                    num_remaining,
                    cost.num_tokens_within(budget, num_computed),
                    threshold=self.config.long_prefill_token_threshold,
                    may_be_cut=True,
                    whole_budget=self.config.max_num_batched_tokens,
                )
            block_ids = self.kv_cache_manager.allocate_slots(request, count)
            if block_ids is not None:
                plan.give(request, count, block_ids, cost.surcharge(num_computed, count, budget))
                plan.is_short |= count < most
                return
            if plan.has_admitted:
                return  # it gave way, and nobody falls now
            victim = choose_victim(self.running, self.policy.rank, self.config.max_num_preemptions)
            if victim is None:
                self._stall(request, plan)
                return
            self._preempt(victim, request, plan)
            if victim is request:
                return

    def _stall(self, request: Request, plan: StepPlan) -> None:
        """Let a running request wait for blocks; alone, with nobody to wait for, it has filled the cache and ends."""
        plan.held_up = plan.held_up or WaitReason.NO_BLOCKS
        self._emit(events.RequestStalled, request.request_id)
        if len(self.running) == 1 and not self.kv_cache_manager.num_transfers:
            self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            self._news.append(EngineCoreOutput(request.request_id, finish_reason=request.status.finish_reason))
            self._drop_finished()

    def _admit_waiting(self, plan: StepPlan, before: Request | None) -> None:
        """Admit from the queue's head until something does not fit; nobody overtakes the one who waits there.

        before: admit only those who are more important than this running request.
        """
        reason = WaitReason.PREEMPTING if plan.preempted else plan.held_up
        rank = self.policy.rank
        while self.waiting and reason is None:
            if before is not None and rank(self.waiting.peek_request()) > rank(before):
                return
            if not self._has_seat():
                reason = WaitReason.NO_SEAT
            elif plan.budget <= 0:
                reason, plan.is_short = WaitReason.NO_BUDGET, True
            else:
                reason = self._admit_next(plan)
        plan.held_up = reason
        if self.waiting and reason is not None:
            self._note_blocked(self.waiting.peek_request(), reason)

    def _admit_next(self, plan: StepPlan) -> WaitReason | None:
        """Admit the head of the queue, or let it wait beside the queue; return why it can do neither, or None."""
        request = self.waiting.peek_request()
        computed = self.kv_cache_manager.get_computed_blocks(request)
        awaited = self.kv_cache_manager.awaited_block(request, computed)
        if awaited is not None and self.room.may_park(request) and self._may_wait_for(awaited[1], request):
            self.room.park(awaited[0], self._num_busy_steps)
            self._blocked = None
            self._emit(events.RequestParked, request.request_id, awaited[1])
            return None
        reason = self.admission.refusal(request, computed, len(self.running))
        if reason is not None:
            return reason
        num_external = self._num_external_tokens(request, computed)
        if num_external:
            return self._start_load(request, computed, num_external, plan)
        admission, cost, budget = self.admission, self._prompt_cost, plan.budget
        num_remaining, threshold = request.num_tokens - computed.num_tokens, self.config.long_prefill_token_threshold
        room = cost.num_tokens_within(budget, computed.num_tokens)
        count = num_tokens_to_schedule(
            num_remaining,
            int(min(room, admission.prefill_room)),
            threshold=threshold,
            may_be_cut=self.config.enable_chunked_prefill,
            whole_budget=int(min(self.config.max_num_batched_tokens, admission.largest_prefill)),
        )
        if count <= 0:
            return WaitReason.NO_BUDGET
        block_ids = self.kv_cache_manager.allocate_slots(
            request, count, computed, num_reserved_tokens=admission.num_reserved_tokens(request)
        )
        if block_ids is None:
            return WaitReason.NO_BLOCKS
        self._admit(request, computed)
        admission.admitted(request, count)
        plan.give(request, count, block_ids, cost.surcharge(computed.num_tokens, count, budget))
        plan.is_short |= room < min(num_remaining, threshold or num_remaining)
        plan.has_admitted = True
        return None

    def _may_wait_for(self, owner_id: str, request: Request) -> bool:
        """Whether a request may wait for what another one computes: not if that one is less important than itself."""
        rank = self.policy.rank
        return not self.policy.ranks_are_fixed or rank(self.requests[owner_id]) < rank(request)

    def _note_blocked(self, request: Request, reason: WaitReason) -> None:
        if self._blocked != (request.request_id, reason):
            self._blocked = (request.request_id, reason)
            self._emit(events.RequestBlocked, request.request_id, reason)

    def _return_parked(self) -> None:
        for request, timed_out in self.room.return_parked(
            self.kv_cache_manager.is_being_computed, self._num_busy_steps
        ):
            self._emit(events.RequestUnparked, request.request_id, timed_out)

    def _admit(self, request: Request, computed: ComputedBlocks) -> None:
        """Take the head of the queue into the running."""
        self.room.take()
        self._run(request, computed.num_tokens)
        self._note_admitted(request, computed)

    def _run(self, request: Request, num_computed_tokens: int) -> None:
        """Let a request run. Its place among the running, which are served in order, is by importance or by arrival."""
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if self.policy.ranks_are_fixed:
            insort(self.running, request, key=self.policy.rank)
        else:
            self.running.append(request)

    def _note_admitted(self, request: Request, computed: ComputedBlocks) -> None:
        """Tell of an admission; what it computes and what it found counts only the first time."""
        request_id, num_tokens = request.request_id, request.num_tokens
        resumed = request.admitted_time is not None
        if not resumed:
            request.admitted_time = self._now
        self._blocked = None
        if not resumed:
            num_fresh = request.num_prompt_tokens - computed.num_tokens
            self.policy.counters.charge_input(request.tenant, max(num_fresh, 0) / request.tenant_weight)
            if self.kv_cache_manager.enable_prefix_caching and request.reads_prefix_cache:
                miss = self.kv_cache_manager.why_missed(request, computed)
                reason, position = (miss.reason, miss.position) if miss else (None, None)
                num_hit = computed.num_tokens
                self._emit(events.PrefixCacheQueried, request_id, num_tokens, num_hit, reason, position)
        self._emit(events.RequestAdmitted, request_id, computed.num_tokens, num_tokens, resumed)

    def _preempt(self, victim: Request, beneficiary: Request, plan: StepPlan, *, forced: bool = False) -> None:
        """Take a victim's blocks and put it back to the front of its class; the step gets its budget back.

        Its tokens are kept. When it resumes their KV comes back from host memory, is found in the prefix cache, or is
        computed again.
        """
        plan.take_back(victim)
        manager, num_lost = self.kv_cache_manager, victim.num_computed_tokens
        swaps = should_swap(self.config, num_lost, manager.num_blocks_for(num_lost)) and manager.swap_out(victim)
        manager.release(victim)
        self.running.remove(victim)
        self.admission.left(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        self._num_sent_tokens.pop(victim.request_id, None)
        self.room.put_back(victim)
        plan.preempted[victim.request_id] = victim
        policy = "" if forced else self.config.policy.value
        self._emit(events.RequestPreempted, victim.request_id, beneficiary.request_id, num_lost, swaps, policy)

    def preempt_requests(self, request_ids: Iterable[str]) -> None:
        """Take the blocks of these requests with the next step, as an operator may wish; they come back by themselves.

        Who does not run by then is passed over.
        """
        self._to_preempt += request_ids

    def _preempt_as_told(self, plan: StepPlan) -> None:
        for request_id in self._to_preempt:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                self._preempt(request, request, plan, forced=True)
        self._to_preempt = []

    # --- KV from outside ----------------------------------------------------------------------------------------------

    def _num_external_tokens(self, request: Request, computed: ComputedBlocks) -> int:
        """How many tokens behind what is computed here can be fetched, one always left to compute."""
        if not request.reads_prefix_cache or request.request_id in self._gave_up_loading:
            return 0
        found = self._connector.get_num_new_matched_tokens(request, computed.num_tokens)
        return max(min(found, request.num_tokens - 1 - computed.num_tokens), 0)

    def _start_load(
        self, request: Request, computed: ComputedBlocks, num_external: int, plan: StepPlan
    ) -> WaitReason | None:
        """Give a request its blocks and let it wait for KV from outside. It keeps its seat."""
        block_ids = self.kv_cache_manager.allocate_slots(
            request, num_external, computed, num_reserved_tokens=self.admission.num_reserved_tokens(request)
        )
        if block_ids is None:
            return WaitReason.NO_BLOCKS
        self.room.take()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = computed.num_tokens
        num_tokens = computed.num_tokens + num_external
        load = self.loads.start(request, num_tokens, self._now + self.config.kv_load_timeout_s)
        self.kv_cache_manager.pin(load.transfer_id, block_ids)
        self._connector.update_state_after_alloc(request, block_ids, num_external)
        token_ids = request.sequence.token_ids[:num_tokens]
        plan.kv_loads.append(
            KVLoad(load.transfer_id, request.request_id, token_ids, list(block_ids), computed.num_tokens)
        )
        self.admission.admitted(request, 0)
        plan.has_admitted = True
        self._note_admitted(request, computed)
        self._emit(events.KVLoadStarted, request.request_id, load.transfer_id, num_external)
        return None

    def _end_load(self, transfer_id: int, *, arrived: bool) -> None:
        """Let a request run on with what arrived, or put it back to compute everything itself."""
        load = self.loads.end(transfer_id)
        if load is None:
            self._emit(events.StaleResultDropped, f"transfer {transfer_id} is over or unknown")
            return
        self.kv_cache_manager.unpin(transfer_id)
        self._emit(events.KVLoadEnded, load.request.request_id, transfer_id, "done" if arrived else "failed")
        if not arrived:
            self._give_up_load(load)
            return
        self._run(load.request, load.num_tokens)
        self.kv_cache_manager.commit(load.request)

    def _give_up_load(self, load: PendingLoad) -> None:
        request = load.request
        self._gave_up_loading.add(request.request_id)
        self.admission.left(request)
        self.kv_cache_manager.release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self.room.put_back(request)

    def _cancel_load(self, request_id: str, outcome: str) -> PendingLoad | None:
        """Stop waiting for a transfer. Its blocks stay pinned until the worker has been told to write no more."""
        transfer_id = self.loads.of_request(request_id)
        load = None if transfer_id is None else self.loads.end(transfer_id)
        if load is not None:
            self._cancels.append(load.transfer_id)
            self._emit(events.KVLoadEnded, request_id, load.transfer_id, outcome)
        return load

    def _expire_loads(self) -> None:
        for load in self.loads.expired(self._now):
            self._cancel_load(load.request.request_id, "expired")
            self._give_up_load(load)

    # --- out and back -------------------------------------------------------------------------------------------------

    def _make_output(self, plan: StepPlan) -> SchedulerOutput:
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        drafts: dict[str, list[int]] = {}
        num_sent_tokens, new_block_ids = self._num_sent_tokens, plan.new_block_ids
        for request_id, count in plan.num_tokens.items():
            request = self.requests[request_id]
            token_ids = request.sequence.token_ids
            num_sent = num_sent_tokens.get(request_id)
            num_sent_tokens[request_id] = len(token_ids)
            if num_sent is None:
                new.append(NewRequestData.from_request(request))
            else:
                cached.req_ids.append(request_id)
                cached.new_token_ids.append(token_ids[num_sent:])
                cached.new_block_ids.append(new_block_ids[request_id])
                cached.num_computed_tokens.append(request.num_computed_tokens)
            if not request.spec_token_ids:
                continue
            num_drafts = request.num_computed_tokens + count - len(token_ids)
            if num_drafts > 0:
                drafts[request_id] = request.spec_token_ids[:num_drafts]
        total = sum(plan.num_tokens.values())
        assert plan.is_balanced, "a victim's budget was not returned"
        output = SchedulerOutput(
            step=self._step,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=plan.num_tokens,
            total_num_scheduled_tokens=total,
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=set(plan.preempted),
            scheduled_spec_decode_tokens=drafts,
            copies=self.kv_cache_manager.take_copies(),
            kv_loads=plan.kv_loads,
            kv_cancels=self._cancels,
            num_pending_loads=len(self.loads),
        )
        self._finished_req_ids = set()
        self._cancels = []
        return output

    def _emit_step(self, output: SchedulerOutput) -> None:
        if not output.num_scheduled_tokens:
            return
        self._emit(
            events.StepScheduled,
            output.num_scheduled_tokens,
            output.total_num_scheduled_tokens,
            len(self.running),
            len(self.room) + len(self.loads),
            self.kv_cache_manager.pool.usage,
            self._batching.prefill_limit,
        )

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelOutput) -> list[EngineCoreOutput]:
        """Append sampled tokens, check stops, share what is computed, free what ended; return the news.

        A result of another step than `scheduled` changes nothing (it came late or twice).
        """
        self._now = self._clock()
        if result.step != scheduled.step or scheduled.step != self._open_step:
            self._emit(events.StaleResultDropped, f"result of step {result.step} in step {self._step}")
            return []
        self._open_step = None
        for transfer_id in scheduled.kv_cancels:
            self.kv_cache_manager.unpin(transfer_id)
        for transfer_id, arrived in result.kv_loads:
            self._end_load(transfer_id, arrived=arrived)
        self._batching.learn(self._now - self._step_start)
        outputs, self._news = self._news, []
        new_tokens: dict[str, int] = {}
        num_served: defaultdict[str, float] = defaultdict(float)
        errors, num_requests, running = result.errors, len(self.requests), RequestStatus.RUNNING
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not running:
                continue  # aborted while the step ran
            if errors and request_id in errors:
                outputs.append(self._fail(request, errors[request_id]))
                continue
            output = self._update_request(request, count, scheduled, result)
            if output is not None:
                new_tokens[request_id] = num_new = len(output.new_token_ids)
                num_served[request.tenant] += num_new / request.tenant_weight
                outputs.append(output)
        if self.requests:  # else everyone is done, and the counters have begun anew
            for tenant, num_tokens in num_served.items():
                self.policy.counters.charge_output(tenant, num_tokens)
        if len(self.requests) < num_requests:
            self._drop_finished()
        if scheduled.num_scheduled_tokens:
            self._emit(events.StepCompleted, new_tokens)
        return outputs

    def _update_request(
        self, request: Request, count: int, scheduled: SchedulerOutput, result: ModelOutput
    ) -> EngineCoreOutput | None:
        request_id = request.request_id
        sampled = result.sampled_token_ids.get(request_id, [])
        num_rejected = 0
        if request_id in scheduled.scheduled_spec_decode_tokens:
            num_drafts = len(scheduled.scheduled_spec_decode_tokens[request_id])
            num_rejected = num_drafts + 1 - len(sampled)
            self._emit(events.DraftsVerified, request_id, num_drafts, num_drafts - num_rejected)
        prompt_logprobs = self._new_prompt_logprobs(request, result) if result.prompt_logprobs else []
        request.num_computed_tokens += count - num_rejected
        request.num_computed_in_all += count
        request.spec_token_ids = []
        accepted, status = _append_tokens(request, sampled)
        if status is not None:  # drafts behind the token that ends it are not part of it
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.sequence.token_ids) - 1)
        if request.num_computed_tokens >= request.sequence.next_commit:
            self.kv_cache_manager.commit(request)
        if not sampled and request.num_computed_tokens == len(request.sequence.token_ids):
            return self._fail(request, "the worker computed every token and sampled none")
        if status is not None:
            self._finish(request, status)
        elif not (accepted or prompt_logprobs):
            return None
        return EngineCoreOutput(
            request_id,
            accepted,
            result.logprobs[request_id][: len(accepted)] if request_id in result.logprobs else [],
            prompt_logprobs,
            None if status is None else status.finish_reason,
            request.stop_reason,
            request.sequence.num_cached_tokens,
            request.num_computed_in_all,
            request.admitted_time,
            pooled=result.pooled.get(request_id) if result.pooled else None,
        )

    @staticmethod
    def _new_prompt_logprobs(request: Request, result: ModelOutput) -> list[TokenLogprobs]:
        """Those that were not delivered before a preemption; call it before the computed tokens are advanced."""
        entries = result.prompt_logprobs.get(request.request_id, [])
        new = entries[max(request.num_prompt_logprobs - request.num_computed_tokens, 0) :]
        request.num_prompt_logprobs += len(new)
        return new

    def fail_step(self, scheduled: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """End every request of a step that the worker could not do; the others go on.

        Whether the worker heard who ended before is unknown, so it is told again with the next step.
        """
        self._now = self._clock()
        if scheduled.step != self._open_step:
            return []
        self._open_step = None
        self._emit(events.StepFailed, message)
        self._finished_req_ids |= scheduled.finished_req_ids | scheduled.preempted_req_ids
        for request_id in scheduled.preempted_req_ids:
            self.kv_cache_manager.drop_saved(request_id)  # nobody knows whether it was copied
        self._cancels += scheduled.kv_cancels
        for order in scheduled.kv_loads:
            if self.loads.of_request(order.request_id) == order.transfer_id:
                load = self._cancel_load(order.request_id, "failed")
                assert load is not None
                self._give_up_load(load)
        outputs, self._news = self._news, []
        requests = [self.requests.get(request_id) for request_id in scheduled.num_scheduled_tokens]
        for request in requests:
            if request is not None and request.status is RequestStatus.RUNNING:
                outputs.append(self._fail(request, message))
        self._drop_finished()
        return outputs

    def _fail(self, request: Request, message: str) -> EngineCoreOutput:
        self._finish(request, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(request.request_id, finish_reason="error", error=message)

    def update_draft_token_ids(self, drafts: dict[str, list[int]]) -> None:
        """Set what a proposer guesses to follow; drafts of requests that do not decode are dropped."""
        for request_id, token_ids in drafts.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            sequence = request.sequence
            if request.num_computed_tokens == len(sequence.token_ids) - 1:
                room = request.max_total_tokens - len(sequence.token_ids) - 1
                request.spec_token_ids = token_ids[: max(room, 0)]

    def has_work(self) -> bool:
        """Whether a step has anything to compute, or an ending to deliver to the worker."""
        return bool(self.requests or self._finished_req_ids or self._news or self._cancels)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    def check_when_idle(self) -> list[invariants.Breach]:
        """Check all invariants if nobody waits or runs and it was not done lately; return the breaches.

        Blocks whose books are wrong are taken out of use, with an event: a leak must not end the engine.
        """
        self._now = self._clock()
        if self.has_work() or self._now < self._next_check:
            return []
        self._next_check = self._now + IDLE_CHECK_INTERVAL_S
        breaches = invariants.check(self)
        pool = self.kv_cache_manager.pool
        for breach in breaches:
            fresh = tuple(block_id for block_id in breach.block_ids if block_id not in pool.quarantined)
            for block_id in fresh:
                pool.quarantine(pool.blocks[block_id])
            self._emit(events.BlocksQuarantined, fresh, f"invariant {breach.invariant}: {breach.message}")
        return breaches

    @property
    def num_kept_records(self) -> int:
        """Records kept of single requests; 0 when nobody is left."""
        num_own = len(self._num_sent_tokens) + len(self._gave_up_loading) + len(self.loads)
        return num_own + self.room.num_records + self.kv_cache_manager.num_tracked_requests

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.room) + len(self.loads)

    def get_stats(self) -> SchedulerStats:
        """Totals since the start, read from the event stream, and the state now."""
        count = self.counters.count
        return SchedulerStats(
            total_scheduled=self.counters.num_scheduled,
            total_preempted=count[events.RequestPreempted],
            total_swapped=self.counters.num_swapped,
            total_finished=count[events.RequestFinished],
            total_tokens_scheduled=self.counters.num_tokens_scheduled,
            total_tokens_generated=self.counters.num_tokens_generated,
            num_waiting=len(self.room) + len(self.loads),
            num_running=len(self.running),
            kv_cache_usage=self.kv_cache_manager.pool.usage,
            cache_hit_rate=self.counters.cache_hit_rate,
            num_cached_blocks=self.kv_cache_manager.num_cached_blocks,
            num_steps=count[events.StepScheduled],
            prefill_limit=self._batching.prefill_limit,
        )

    def block_map(self) -> BlockMap:
        """Who holds which block now; transfers hold some, too, for nobody or beside a request."""
        holders = {
            request_id: list(request.sequence.block_table)
            for request_id, request in self.requests.items()
            if request.sequence.block_table
        }
        manager = self.kv_cache_manager
        return BlockMap(manager.block_size, manager.pool.states(), holders)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False and nothing changed while any request holds a block."""
        return self.kv_cache_manager.reset_prefix_cache()

    def _emit(self, kind: Callable[..., events.Event], *args: object) -> None:
        self._sink.emit(kind(self._step, self._now, *args))


def _append_tokens(request: Request, sampled: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append tokens until one of them ends the request; those behind it are discarded."""
    token_ids, status = request.sequence.token_ids, None
    num_before = len(token_ids)
    for token_id in sampled:
        token_ids.append(token_id)
        status = check_stop(request)
        if status is not None:
            break
    return token_ids[num_before:], status
