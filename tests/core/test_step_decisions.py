"""Rare decisions of a step: which request stalls or is preempted, why one is refused, and the events about it."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.events import WaitReason
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def blocked(core):
    return [(event.request_id, event.reason) for event in core.log.of_type(events.RequestBlocked)]


def preempted(core):
    return [event.request_id for event in core.log.of_type(events.RequestPreempted)]


def load(core, scheduled):
    """Process a step's result in which its loads arrived."""
    arrived = [EndedTransfer(order.transfer_id, len(order.keys)) for order in scheduled.kv_transfers]
    result = core.compute(scheduled)
    core.scheduler.update_from_output(
        scheduled, ModelOutput(result.step, result.sampled_token_ids, kv_transfers=arrived)
    )


def test_scheduler_runs_without_event_sinks():
    scheduler = Scheduler(
        SchedulerConfig(), CacheConfig(block_size=4), num_blocks=9, max_model_len=99, clock=lambda: 0.0
    )
    scheduler.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=1)))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3}


# --- stalled requests -------------------------------------------------------------------------------------------------


def test_lone_request_in_shrunken_cache_ends_with_length(make_core):
    core = make_core(num_blocks=4, block_size=4)
    core.add("a", 3, max_tokens=12)
    core.step()
    core.scheduler.kv_cache_manager.pool.take(3)
    core.step()
    scheduled = core.scheduler.schedule()
    assert not scheduled.num_scheduled_tokens
    assert core.scheduler.running == []
    [output] = core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert (output.request_id, output.finish_reason) == ("a", "length")


def test_stalled_request_waits_and_is_not_overtaken(make_core):
    core = make_core(num_blocks=20, block_size=4, max_num_batched_tokens=40, long_prefill_token_threshold=24)
    first = core.add("first", 48, max_tokens=2)
    core.add("holder", 24, max_tokens=3).num_preemptions = 99
    core.step()
    pool = core.scheduler.kv_cache_manager.pool
    taken = pool.take(pool.num_free_blocks - 5)
    core.add("small", 3, max_tokens=1)
    assert "first" not in core.step().num_scheduled_tokens
    assert core.log.of_type(events.RequestStalled)[0].request_id == "first"
    assert blocked(core) == [("small", WaitReason.NO_BLOCKS)]
    pool.release(taken)
    core.run()
    assert core.finished == {"first": "length", "holder": "length", "small": "length"}
    assert first.sequence.num_output_tokens == 2


def test_requests_after_stalled_one_get_tokens_until_budget_is_spent(make_core):
    core = make_core(
        policy="priority", ageing_s=None, mixed_step_ms=None, max_num_batched_tokens=12, long_prefill_token_threshold=3
    )
    answers = [core.add(f"answer{number}", 3, priority=9) for number in range(4)]
    core.step()
    core.add("stalled", 24, priority=4)
    for _ in range(3):
        core.step()
    core.add("next", 24, priority=5)
    core.add("last", 24, priority=6)
    core.step()
    core.add("user", 24, priority=0)
    for request in core.scheduler.running:
        request.num_preemptions = 99
    for request, num_drafts in zip(answers, [2, 2, 2, 1], strict=True):
        request.spec_token_ids = [7] * num_drafts
    pool = core.scheduler.kv_cache_manager.pool
    pool.take(pool.num_free_blocks - 4)
    counts = core.scheduler.schedule().num_scheduled_tokens
    assert counts == {"answer0": 3, "answer1": 3, "answer2": 3, "answer3": 2, "next": 1}


# --- preempted requests -----------------------------------------------------------------------------------------------


def test_preempted_request_loses_tokens_scheduled_in_same_step(make_core):
    """Under fair share the least important request may precede the request that needs its blocks."""
    core = make_core(policy="fair", num_blocks=5, block_size=4)
    core.add("greedy", 6, tenant="x")
    core.step()
    core.add("modest", 4, tenant="y")
    core.step()
    core.scheduler.kv_cache_manager.pool.take(core.scheduler.kv_cache_manager.pool.num_free_blocks)
    assert [request.request_id for request in core.scheduler.running] == ["greedy", "modest"]
    assert core.scheduler.schedule().num_scheduled_tokens == {"modest": 1}
    assert preempted(core) == ["greedy"]


@pytest.mark.parametrize(("preemption", "is_swapped"), [("recompute", False), ("swap", True)])
def test_preempted_request_is_swapped_only_if_configured(make_core, preemption, is_swapped):
    core = make_core(preemption=preemption, num_host_blocks=9)
    core.add("a", 9)
    core.step()
    core.scheduler.faults.preempt(["a"])
    core.step()
    assert [event.swapped for event in core.log.of_type(events.RequestPreempted)] == [is_swapped]


def test_preempted_request_is_not_also_reported_as_outranked(make_core):
    core = make_core(
        policy="priority", ageing_s=None, max_num_batched_tokens=8, long_prefill_token_threshold=4, block_size=4
    )
    core.add("first", 24, priority=4)
    core.add("second", 24, priority=5)
    core.step()
    core.add("user", 24, priority=0)
    pool = core.scheduler.kv_cache_manager.pool
    pool.take(pool.num_free_blocks)
    core.step()
    assert preempted(core) == ["second"]
    assert core.log.of_type(events.RequestOutranked) == []


def test_step_that_starts_load_preempts_nothing(make_core):
    core = make_core(
        policy="priority",
        ageing_s=None,
        max_num_batched_tokens=16,
        num_blocks=12,
        block_size=4,
        connector=Store(prefix="loads"),
    )
    core.add("answer", 4, priority=9)
    core.step()
    core.add("batch", 30, priority=5)
    core.step()
    core.add("loads", 9, priority=0)
    pool = core.scheduler.kv_cache_manager.pool
    pool.take(pool.num_free_blocks - 5)
    scheduled = core.scheduler.schedule()
    assert [order.request_id for order in scheduled.kv_transfers] == ["loads"]
    assert preempted(core) == []


# --- outranked requests -----------------------------------------------------------------------------------------------


def test_full_max_num_seqs_outranks_no_request(make_core):
    core = make_core(policy="priority", ageing_s=None, max_num_batched_tokens=8, max_num_seqs=2)
    core.add("answer", 4, priority=5)
    core.step()
    core.add("batch", 30, priority=4)
    core.step()
    core.add("user", 4, priority=0)
    assert list(core.step().num_scheduled_tokens) == ["batch", "answer"]
    assert blocked(core)[-1] == ("user", WaitReason.NO_SEAT)


def test_request_that_does_not_fit_is_tried_once_per_step(make_core):
    core = make_core(policy="priority", ageing_s=None, max_num_batched_tokens=8, num_blocks=10, block_size=4)
    core.add("batch", 30, priority=5)
    core.step()
    core.add("user", 36, priority=0)
    assert core.step().num_scheduled_tokens == {"batch": 8}
    assert blocked(core) == [("user", WaitReason.NO_BLOCKS)]


def test_last_prompt_token_costs_one_budget_token(make_core):
    core = make_core(max_num_batched_tokens=8, attention_cost_tokens=1000.0, block_size=16)
    core.add("a", 9, max_tokens=1)
    core.step()
    core.add("b", 30)
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 7}


# --- events -----------------------------------------------------------------------------------------------------------


def test_blocked_event_is_emitted_again_after_request_ran(make_core):
    core = make_core()
    core.add("a", 3)
    for _ in range(2):
        core.step()
        core.scheduler.faults.preempt(["a"])
        core.step()
    assert blocked(core) == [("a", WaitReason.PREEMPTING)] * 2


def test_blocked_event_is_emitted_again_after_load(make_core):
    core = make_core(connector=Store(prefix="loads"), enable_prefix_caching=False)
    core.add("loads", 12)
    for _ in range(2):
        load(core, core.scheduler.schedule())
        core.step()
        core.scheduler.faults.preempt(["loads"])
        core.step()
    assert blocked(core) == [("loads", WaitReason.PREEMPTING)] * 2


def test_blocked_event_is_emitted_again_after_deferral(make_core):
    core = make_core(max_num_batched_tokens=8, block_size=4)
    prompt = list(range(12))
    core.add("owner", prompt)
    core.add("waits", prompt)
    core.step()
    core.step()
    assert [event.request_id for event in core.log.of_type(events.RequestParked)] == ["waits"]
    core.scheduler.requests["owner"].spec_token_ids = [7] * 7
    core.step()
    assert blocked(core) == [("waits", WaitReason.NO_BUDGET)] * 2


def test_abort_event_has_time_of_abort(make_core):
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    core.add("a", 3)
    now[0] = 5.0
    core.scheduler.abort_request("a")
    assert core.log.of_type(events.RequestFinished)[0].time == 5.0


def test_step_fails_only_once(make_core):
    core = make_core()
    core.add("a", 3)
    scheduled = core.scheduler.schedule()
    for _ in range(2):
        core.scheduler.fail_step(scheduled, "out of memory")
    assert len(core.log.of_type(events.StepFailed)) == 1


def test_aborted_request_drops_record_of_timed_out_deferral(make_core):
    core = make_core(long_prefill_token_threshold=1, block_size=32)
    core.add("slow", list(range(100)))
    core.add("waits", list(range(100)))
    while not core.log.of_type(events.RequestUnparked):
        core.step()
    for name in ("waits", "slow"):
        core.scheduler.abort_request(name)
    core.step()
    assert core.scheduler.num_kept_records == 0


# --- what a step that was too short teaches ---------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "is_short"), [(8, False), (9, True)])
def test_step_is_short_only_if_tokens_exceed_budget(make_core, num_tokens, is_short):
    core = make_core(max_num_batched_tokens=8)
    core.add("a", num_tokens)
    core.scheduler.schedule()
    assert core.scheduler._state.in_flight.steps[0].plan.is_short is is_short


@pytest.mark.parametrize(("threshold", "limit"), [(0, 25), (10, 20)])
def test_step_is_short_if_new_request_gets_less_than_its_threshold(make_core, threshold, limit):
    now = [0.0]
    core = make_core(
        clock=lambda: now[0], max_num_batched_tokens=160, mixed_step_ms=100.0, long_prefill_token_threshold=threshold
    )
    core.add("answer", 3, max_tokens=99)
    core.step()
    core.add("prompt", 900)
    scheduled = core.scheduler.schedule()
    now[0] += 0.001
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert core.scheduler.batching.prefill_limit == limit
