"""Grow the running, admit the waiting. There is no prefill phase and no decode phase: computed tokens chase tokens.

A request has `num_tokens` (prompt, output and drafts) and `num_computed_tokens`; a step gives it some more. A decode is
a chunk of one, a prefix hit a head start, a preemption a step back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo import events
from octavo.core.kv_cache_manager import NO_COMPUTED_BLOCKS, ComputedBlocks, KVCacheManager
from octavo.core.policy import create_victim_policy, num_tokens_to_schedule
from octavo.core.request_queue import create_request_queue
from octavo.core.scheduler_interface import SchedulerStats
from octavo.core.step_plan import StepPlan
from octavo.core.stop import check_stop
from octavo.errors import PromptTooLongError, QueueFullError, RequestError
from octavo.outputs import EngineCoreOutput
from octavo.request import Request, RequestStatus
from octavo.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.config import CacheConfig, SchedulerConfig
    from octavo.events import EventSink
    from octavo.model_output import ModelOutput, TokenLogprobs


class Scheduler:
    """Owns the status and counters of every request; blocks belong to the `KVCacheManager` it asks."""

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
    ) -> None:
        self.config = scheduler_config
        self.max_model_len = max_model_len
        self.waiting = create_request_queue(scheduler_config.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = events.EventCounters()
        self._sink = events.FanOut([self.counters, sink or events.NullSink()])
        self._clock = clock
        self._victims = create_victim_policy(scheduler_config.policy)
        self._step = 0
        self._num_arrivals = 0
        self._num_sent_tokens: dict[str, int] = {}
        self._finished_req_ids: set[str] = set()
        self.kv_cache_manager = KVCacheManager(
            num_blocks,
            cache_config.block_size,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            extra_keys=cache_keys,
            on_cached=lambda block_id: self._emit(events.BlockCached, block_id),
            on_evict=lambda block_id: self._emit(events.BlockEvicted, block_id),
        )

    def add_request(self, request: Request) -> None:
        """Accept a request into the queue.

        Raises `RequestError` for an id in use, a full queue, or a request that could never fit: its prompt and one
        more token must fit the model's length and an empty cache. Nothing changes then.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", parameter="request_id")
        self._check_fits(request)
        limit = self.config.max_num_waiting
        if limit is not None and len(self.waiting) >= limit:
            raise QueueFullError(f"the queue is full: {limit} requests wait already (max_num_waiting)")
        capacity = self.kv_cache_manager.capacity_tokens
        # The newest token needs no slot until it is fed back: one more than the capacity can be produced.
        request.max_total_tokens = min(request.max_total_tokens, self.max_model_len, capacity + 1)
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        self._emit(events.RequestQueued, request.request_id, request.num_prompt_tokens, request.priority)

    def _check_fits(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        if num_prompt >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens; with one token of output the limit is "
                f"max_model_len - 1 = {self.max_model_len - 1}",
                parameter="prompt",
            )
        capacity = self.kv_cache_manager.capacity_tokens
        if num_prompt + 1 > capacity:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and can never fit the KV cache of {capacity} tokens with one "
                "token of output; give the cache more memory (kv_cache_memory_bytes)",
                parameter="prompt",
            )

    def abort_request(self, request_id: str) -> list[EngineCoreOutput]:
        """End one request at the user's wish, in any state; unknown and finished ids are passed over."""
        return self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End requests from outside: their blocks are free at once, the worker hears of it with the next step."""
        assert status.is_finished
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)
                outputs.append(EngineCoreOutput(request_id, finish_reason=status.finish_reason))
        return outputs

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """The one place where a request ends."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
        request.status = status
        request.spec_token_ids = []
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._num_sent_tokens.pop(request.request_id, None)
        self._finished_req_ids.add(request.request_id)
        reason = status.finish_reason or ""
        self._emit(events.RequestFinished, request.request_id, reason, request.sequence.num_output_tokens)

    def schedule(self) -> SchedulerOutput:
        """Decide who gets how many tokens of the next step: the running first, then the waiting in order.

        Nobody is admitted in a step that preempted somebody.
        """
        self._step += 1
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._grow_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        output = self._make_output(plan)
        self._emit_step(output)
        return output

    def _grow_running(self, plan: StepPlan) -> None:
        """Give each running request its next tokens; keep one of the budget for everyone who comes after it."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            num_after = len(self.running) - index - 1
            count = self._num_tokens(request, request.num_computed_tokens, plan.budget - num_after, may_be_cut=True)
            block_ids = self.kv_cache_manager.allocate_slots(request, count)
            while block_ids is None:
                victim = self._victims.victim(self.running)
                if self._preempt(victim, request, plan):
                    index -= 1
                if victim is request:
                    break
                block_ids = self.kv_cache_manager.allocate_slots(request, count)
            else:
                plan.give(request, count, block_ids)
                index += 1

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit from the queue's head until something does not fit; nobody overtakes the one who waits there."""
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek_request()
            computed = self.kv_cache_manager.get_computed_blocks(request)
            count = self._num_tokens(
                request, computed.num_tokens, plan.budget, may_be_cut=self.config.enable_chunked_prefill
            )
            # Each running request is left a block to grow into, or the newcomer would be the first to be evicted.
            if count == 0 or not self.kv_cache_manager.can_hold_whole(request, computed, len(self.running)):
                return
            block_ids = self.kv_cache_manager.allocate_slots(request, count, computed)
            if block_ids is None:
                return
            self.waiting.pop_request()
            self._admit(request, computed)
            plan.admitted.append(request)
            plan.give(request, count, block_ids)

    def _num_tokens(self, request: Request, num_computed: int, budget: int, *, may_be_cut: bool) -> int:
        return num_tokens_to_schedule(
            request.num_tokens - num_computed,
            budget,
            threshold=self.config.long_prefill_token_threshold,
            may_be_cut=may_be_cut,
            whole_budget=self.config.max_num_batched_tokens,
        )

    def _admit(self, request: Request, computed: ComputedBlocks) -> None:
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = computed.num_tokens
        self.running.append(request)
        request_id, num_tokens = request.request_id, request.num_tokens
        if computed is not NO_COMPUTED_BLOCKS and not resumed:
            self._emit(events.PrefixCacheQueried, request_id, num_tokens, computed.num_tokens)
        self._emit(events.RequestAdmitted, request_id, computed.num_tokens, num_tokens, resumed)

    def _preempt(self, victim: Request, beneficiary: Request, plan: StepPlan) -> bool:
        """Take a victim's blocks and put it back to the front of its class; whether it was in the step already.

        Its tokens are kept: when it resumes it computes their KV again, or finds it in the prefix cache.
        """
        was_scheduled = plan.take_back(victim)
        num_lost = victim.num_computed_tokens
        self.kv_cache_manager.release(victim)
        self.running.remove(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        self._num_sent_tokens.pop(victim.request_id, None)
        self.waiting.prepend_request(victim)
        plan.preempted[victim.request_id] = victim
        self._emit(events.RequestPreempted, victim.request_id, beneficiary.request_id, num_lost)
        return was_scheduled

    def _make_output(self, plan: StepPlan) -> SchedulerOutput:
        new = [NewRequestData.from_request(request) for request in plan.admitted]
        new_ids = {data.request_id for data in new}
        cached = CachedRequestData.make_empty()
        drafts: dict[str, list[int]] = {}
        for request_id, count in plan.num_tokens.items():
            request = self.requests[request_id]
            token_ids = request.sequence.token_ids
            if request_id not in new_ids:
                new_tokens = token_ids[self._num_sent_tokens[request_id] :]
                cached.append(request_id, new_tokens, plan.new_block_ids[request_id], request.num_computed_tokens)
            self._num_sent_tokens[request_id] = len(token_ids)
            num_drafts = request.num_computed_tokens + count - len(token_ids)
            if num_drafts > 0:
                drafts[request_id] = request.spec_token_ids[:num_drafts]
        output = SchedulerOutput(
            step=self._step,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=plan.num_tokens,
            total_num_scheduled_tokens=sum(plan.num_tokens.values()),
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=set(plan.preempted),
            scheduled_spec_decode_tokens=drafts,
        )
        self._finished_req_ids = set()
        return output

    def _emit_step(self, output: SchedulerOutput) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            num_computed = self.requests[request_id].num_computed_tokens
            self._emit(events.TokensScheduled, request_id, count, num_computed)
        if not output.num_scheduled_tokens:
            return
        self._emit(
            events.StepScheduled,
            len(output.num_scheduled_tokens),
            output.total_num_scheduled_tokens,
            len(self.running),
            len(self.waiting),
            self.kv_cache_manager.pool.usage,
        )

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelOutput) -> list[EngineCoreOutput]:
        """Append sampled tokens, check stops, share what is computed, free what ended; return the news.

        A result of another step than `scheduled` changes nothing (it came late or twice).
        """
        if result.step != scheduled.step or scheduled.step != self._step:
            self._emit(events.StaleResultDropped, f"result of step {result.step} in step {self._step}")
            return []
        outputs = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the step ran
            if request_id in result.errors:
                outputs.append(self._fail(request, result.errors[request_id]))
                continue
            output = self._update_request(request, count, scheduled, result)
            if output is not None:
                outputs.append(output)
        return outputs

    def _update_request(
        self, request: Request, count: int, scheduled: SchedulerOutput, result: ModelOutput
    ) -> EngineCoreOutput | None:
        request_id = request.request_id
        sampled = result.sampled_token_ids.get(request_id, [])
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
        num_rejected = num_drafts + 1 - len(sampled) if num_drafts else 0
        prompt_logprobs = self._new_prompt_logprobs(request, result)
        request.num_computed_tokens += count - num_rejected
        request.spec_token_ids = []
        accepted, status = self._append_tokens(request, sampled)
        self.kv_cache_manager.commit(request)
        if not sampled and request.num_computed_tokens == len(request.sequence.token_ids):
            return self._fail(request, "the worker computed every token and sampled none")
        if status is not None:
            self._finish(request, status)
        elif not (accepted or prompt_logprobs):
            return None
        return EngineCoreOutput(
            request_id,
            new_token_ids=accepted,
            new_logprobs=result.logprobs.get(request_id, [])[: len(accepted)],
            new_prompt_logprobs=prompt_logprobs,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.sequence.num_cached_tokens,
        )

    @staticmethod
    def _new_prompt_logprobs(request: Request, result: ModelOutput) -> list[TokenLogprobs]:
        """Those that were not delivered before a preemption; call it before the computed tokens are advanced."""
        entries = result.prompt_logprobs.get(request.request_id, [])
        new = entries[max(request.num_prompt_logprobs - request.num_computed_tokens, 0) :]
        request.num_prompt_logprobs += len(new)
        return new

    def _append_tokens(self, request: Request, sampled: list[int]) -> tuple[list[int], RequestStatus | None]:
        """Append tokens until one of them ends the request; those behind it are discarded."""
        accepted: list[int] = []
        status = None
        is_first = request.sequence.num_output_tokens == 0
        for token_id in sampled:
            request.sequence.token_ids.append(token_id)
            accepted.append(token_id)
            status = check_stop(request)
            if status is not None:
                break
        if accepted:
            self._emit(events.TokensGenerated, request.request_id, len(accepted), is_first)
        return accepted, status

    def fail_step(self, scheduled: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """End every request of a step that the worker could not do; the others go on.

        Whether the worker heard who ended before is unknown, so it is told again with the next step.
        """
        self._emit(events.StepFailed, message)
        self._finished_req_ids |= scheduled.finished_req_ids | scheduled.preempted_req_ids
        requests = [self.requests.get(request_id) for request_id in scheduled.num_scheduled_tokens]
        return [self._fail(request, message) for request in requests if request is not None]

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
        return bool(self.requests or self._finished_req_ids)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    def get_stats(self) -> SchedulerStats:
        """Totals since the start, read from the event stream, and the state now."""
        count, tokens = self.counters.count, self.counters.tokens
        return SchedulerStats(
            total_scheduled=count[events.TokensScheduled],
            total_preempted=count[events.RequestPreempted],
            total_finished=count[events.RequestFinished],
            total_tokens_scheduled=tokens[events.TokensScheduled],
            total_tokens_generated=tokens[events.TokensGenerated],
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            kv_cache_usage=self.kv_cache_manager.pool.usage,
            cache_hit_rate=self.counters.cache_hit_rate,
            num_cached_blocks=self.kv_cache_manager.num_cached_blocks,
            num_steps=count[events.StepScheduled],
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False and nothing changed while any request holds a block."""
        return self.kv_cache_manager.reset_prefix_cache()

    def _emit(self, kind: Callable[..., events.Event], *args: object) -> None:
        self._sink.emit(kind(self._step, self._clock(), *args))
