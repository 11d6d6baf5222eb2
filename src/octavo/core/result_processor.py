"""Processes step results."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from octavo.core.policy import is_decode
from octavo.core.stop import check_stop
from octavo.data import events
from octavo.outputs import EngineCoreOutput

if TYPE_CHECKING:
    from octavo.core.core_state import CoreState
    from octavo.core.lifecycle import RequestLifecycle
    from octavo.core.steps_in_flight import StepInFlight
    from octavo.data.kv_tiers import EndedTransfer
    from octavo.data.model_output import ModelOutput, TokenLogprobs
    from octavo.data.request import Request, RequestStatus
    from octavo.data.scheduler_output import SchedulerOutput


class ResultProcessor:
    """Applies step results."""

    def __init__(self, state: CoreState, lifecycle: RequestLifecycle) -> None:
        self._state, self._lifecycle, self._emitter = state, lifecycle, state.emitter
        self._last_result = 0.0

    def process(self, step: StepInFlight, result: ModelOutput) -> list[EngineCoreOutput]:
        """Process a step's result, and learn from its duration.

        The duration begins when the step was scheduled, or when the previous result arrived, whichever is later.
        """
        now = self._emitter.now
        seconds = now - max(step.start, self._last_result)
        self._last_result = now
        self._state.batching.learn(step.plan, seconds)
        if self._state.transfers.learns_steps:
            self._state.transfers.learn_step(step.scheduled, seconds)
        outputs = self._advance(step, result)
        timed = self._state.draft_policy.learn(step.scheduled, result, seconds)
        if timed is not None:
            self._emitter.emit(events.DraftsTimed, *timed)
        if result.draft_token_ids:
            self._take_drafts(result.draft_token_ids)
        return outputs

    def _advance(self, step: StepInFlight, result: ModelOutput) -> list[EngineCoreOutput]:
        lifecycle, requests, outputs = self._lifecycle, self._state.requests, list[EngineCoreOutput]()
        scheduled, ended_ids = step.scheduled, step.ended_ids
        self._state.transfers.end_cancels(scheduled.kv_cancels)
        for ended in result.kv_transfers:
            self._end_transfer(ended)
        self._emit_work(result)
        new_tokens: dict[str, int] = {}
        num_served: defaultdict[str, float] = defaultdict(float)
        errors, drafts = result.errors, scheduled.scheduled_spec_decode_tokens
        num_requests = len(requests)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if request_id in ended_ids:
                continue
            request = requests[request_id]
            if errors and request_id in errors:
                outputs.append(lifecycle.fail(request, errors[request_id]))
                continue
            sampled = result.sampled_token_ids.get(request_id, [])
            num_drafts = len(drafts.get(request_id, ())) if drafts else 0
            output = self._update(request, count, num_drafts, sampled, result)
            if output is not None:
                new_tokens[request_id] = num_new = len(output.new_token_ids)
                options = request.options
                num_served[options.tenant] += num_new / options.tenant_weight
                outputs.append(output)
        if requests:  # otherwise the counters were just reset
            for tenant, num_tokens in num_served.items():
                self._state.policy.counters.charge_output(tenant, num_tokens)
        if len(requests) < num_requests:
            lifecycle.drop_finished()
        if scheduled.num_scheduled_tokens:
            checkpoints = self._state.manager.checkpoints
            slots = None if checkpoints is None else checkpoints.group.slots
            self._emitter.emit(events.StepCompleted, new_tokens, slots)
        return outputs

    def _emit_work(self, result: ModelOutput) -> None:
        if result.host_moves:
            self._emitter.emit(events.HostBlocksCopied, *result.host_moves)
        if result.num_compilations:
            self._emitter.emit(events.KernelsCompiled, result.num_compilations)
        if result.experts is not None:
            self._emitter.emit(events.ExpertsComputed, result.experts)

    def _end_transfer(self, ended: EndedTransfer) -> None:
        load = self._state.transfers.end(ended)
        if load is None:
            return
        assert load.request is not None
        num_tokens = self._state.transfers.num_computed_tokens(load, ended.num_blocks)
        if num_tokens:
            self._lifecycle.end_loading(load.request, num_tokens)
        else:
            self._lifecycle.abandon_loading(load.request)

    def _update(
        self, request: Request, count: int, num_drafts: int, sampled: list[int], result: ModelOutput
    ) -> EngineCoreOutput | None:
        """Advance a request by `count` computed tokens, of which the last `num_drafts` are drafts.

        sampled: Accepted drafts and one more token. Empty if known tokens remain uncomputed or sampling was postponed.
        """
        request_id, sequence, num_sampled = request.request_id, request.sequence, len(sampled)
        num_computed = request.num_computed_tokens + count
        num_due = num_drafts + 1 if num_computed >= len(sequence.token_ids) else 0
        is_postponed = num_due > 0 and request_id in result.postponed
        most = 0 if is_postponed else num_due
        if num_sampled > most or (most and not num_sampled):
            none_due = "its token is postponed" if is_postponed else "some of its known tokens are not computed"
            due = f"1 to {most} were expected" if most else none_due
            return self._lifecycle.fail(request, f"the worker sampled {num_sampled} tokens; {due}")
        if is_postponed:
            self._emitter.emit(events.TokenPostponed, request_id)
        elif num_drafts:
            self._state.draft_policy.verified(request, num_drafts, num_sampled - 1)
            self._emitter.emit(events.DraftsVerified, request_id, num_drafts, num_sampled - 1)
        prompt_logprobs = _new_prompt_logprobs(request, result) if result.prompt_logprobs else []
        request.num_computed_tokens = num_computed - (num_due - num_sampled)
        request.num_computed_in_all += count
        if request.spec_token_ids:
            request.spec_token_ids = []
        accepted, status = _append_tokens(request, sampled)
        if status is not None:  # ignore drafts after the final token
            request.num_computed_tokens = min(request.num_computed_tokens, len(sequence.token_ids) - 1)
        # A state after accepted drafts is saved one step later than their blocks are committed.
        if request.num_computed_tokens >= sequence.next_commit or sequence.saves.pending:
            saved_states = self._state.manager.commit(request)
            self._state.transfers.offer(request, saved_states)
            self._state.manager.release_unread(request)
        if status is not None:
            self._lifecycle.finish(request, status)
        elif not (accepted or prompt_logprobs):
            return None
        return EngineCoreOutput(
            request_id,
            accepted,
            result.logprobs[request_id][: len(accepted)] if request_id in result.logprobs else [],
            prompt_logprobs,
            None if status is None else status.finish_reason,
            request.stop_reason,
            sequence.num_cached_tokens,
            request.num_computed_in_all,
            request.admitted_time,
            None,
            result.pooled.get(request_id) if result.pooled else None,
            num_drafts,
            num_sampled - 1 if num_drafts else 0,
        )

    def fail(self, step: StepInFlight, message: str) -> list[EngineCoreOutput]:
        """See `Scheduler.fail_step`."""
        self._emitter.emit(events.StepFailed, message)
        self._undo(step.scheduled)
        outputs = [self._lifecycle.fail(request, message) for request in step.requests(self._state.requests)]
        self._lifecycle.drop_finished()
        for each in self._state.in_flight.take_all():
            self._emitter.step = each.scheduled.step
            self._emitter.emit(events.StepFailed, message)
            self._preempt_all(each)
        return outputs

    def _preempt_all(self, step: StepInFlight) -> None:
        self._undo(step.scheduled)
        for request in step.requests(self._state.requests):
            num_lost = request.num_computed_tokens
            self._lifecycle.preempt(request)
            self._emitter.emit(events.RequestPreempted, request.request_id, request.request_id, num_lost, False, "")

    def _undo(self, scheduled: SchedulerOutput) -> None:
        self._state.builder.fail_step(scheduled)
        for request_id in scheduled.preempted_req_ids:
            self._state.manager.drop_saved(request_id)  # the copy to host memory may be missing
        self._state.manager.fail_copies(scheduled.copies)
        for loading in self._state.transfers.fail_step(scheduled.kv_transfers, scheduled.kv_cancels):
            self._lifecycle.abandon_loading(loading)

    def _take_drafts(self, drafts: dict[str, list[int]]) -> None:
        wanted: list[tuple[Request, int]] = []
        for request_id, token_ids in drafts.items():
            request = self._state.requests.get(request_id)
            if request is None or not is_decode(request) or self._state.in_flight.has(request_id):
                continue
            num_left = request.max_total_tokens - len(request.sequence.token_ids) - 1
            wanted.append((request, min(num_left, len(token_ids))))
        num_decoding = sum(map(is_decode, self._state.running))
        for (request, _), count in zip(wanted, self._state.draft_policy.allot(wanted, num_decoding), strict=True):
            request.spec_token_ids = drafts[request.request_id][:count]


def _new_prompt_logprobs(request: Request, result: ModelOutput) -> list[TokenLogprobs]:
    """Return undelivered prompt logprobs. Call this before `num_computed_tokens` advances."""
    entries = result.prompt_logprobs.get(request.request_id, [])
    new = entries[max(request.num_prompt_logprobs - request.num_computed_tokens, 0) :]
    request.num_prompt_logprobs += len(new)
    return new


def _append_tokens(request: Request, sampled: list[int]) -> tuple[list[int], RequestStatus | None]:
    token_ids = request.sequence.token_ids
    for count, token_id in enumerate(sampled, 1):
        token_ids.append(token_id)
        status = check_stop(request)
        if status is not None:
            return sampled[:count], status
    return sampled, None
