"""The scheduler's figures and events, the requests that it refuses, and its checks of its own state."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import CacheConfig
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request, RequestStatus
from octavo.errors import PromptTooLongError, RequestError
from octavo.sampling_params import SamplingParams


class Clock:
    """A clock that shows the time it is set to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def told(core, kind):
    """Return the events of a kind without step and time."""
    return [tuple(getattr(event, name) for name in event.__slots__) for event in core.log.of_type(kind)]


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_refused_request_changes_no_state(make_core):
    core = make_core(num_blocks=4, max_model_len=14, max_num_waiting=1)
    core.add("a", 3, max_tokens=99)
    for name, prompt, error in (("a", 3, "in use"), ("b", [], "empty"), ("b", 15, "14"), ("b", 3, "full")):
        request = Request(name, [1] * prompt if prompt else [], SamplingParams(max_tokens=7))
        with pytest.raises(RequestError, match=error):
            core.scheduler.add_request(request)
        assert request.max_total_tokens == (prompt or 0) + 7
    request = Request("b", [1] * 3, SamplingParams(max_tokens=99))
    with pytest.raises(RequestError, match="full"):
        core.scheduler.add_request(request)
    assert request.max_total_tokens == 102  # the requested length, which is sent to another engine
    assert list(core.scheduler.requests) == ["a"]
    with pytest.raises(RequestError) as caught:
        core.scheduler.add_request(Request("a", [1], SamplingParams()))
    assert caught.value.parameter == "request_id"
    with pytest.raises(RequestError) as caught:
        core.scheduler.add_request(Request("b", [], SamplingParams()))
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "expected"), [(99, 14, 14), (99, 999, 102), (3, 999, 13), (3, 12, 12)]
)
def test_max_total_tokens_is_limited_by_model_length_and_cache(make_core, num_blocks, max_model_len, expected):
    core = make_core(num_blocks=num_blocks, max_model_len=max_model_len)
    assert core.add("a", 3, max_tokens=99).max_total_tokens == expected


@pytest.mark.parametrize("admission", ["optimistic", "reservation"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pooled_prompt_may_fill_model_length_and_cache(make_core, admission, async_scheduling):
    core = make_core(
        num_blocks=3,
        max_model_len=12,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        admission=admission,
        async_scheduling=async_scheduling,
    )
    assert core.add("a", 12, max_tokens=1, pooling="last").max_total_tokens == 12
    core.run()
    assert core.finished == {"a": "length"}
    assert core.scheduler.kv_cache_manager.pool.num_free_blocks == 3
    with pytest.raises(
        PromptTooLongError, match=r"13 tokens > 12 maximum; this model's .* is 12 tokens .max_model_len.$"
    ):
        core.add("b", 13, max_tokens=1, pooling="last")
    with pytest.raises(PromptTooLongError, match=r"12 tokens > 11 maximum.* and the output needs one"):
        core.add("c", 12)


def test_reservation_refuses_request_larger_than_cache(make_core):
    core = make_core(num_blocks=3, max_model_len=10, admission="reservation")
    core.add("a", 3, max_tokens=99)
    core = make_core(num_blocks=3, max_model_len=13, admission="reservation")
    with pytest.raises(PromptTooLongError):
        core.add("a", 3, max_tokens=99)


def test_host_memory_and_store_are_absent_by_default(make_core):
    core = make_core()
    scheduler = Scheduler(
        core.scheduler.config, CacheConfig(block_size=4), num_blocks=4, max_model_len=99, clock=Clock()
    )
    assert scheduler.kv_cache_manager.host.num_blocks == 0
    assert not scheduler.transfers.has_store
    assert make_core(connector=Store(prefix="loads")).scheduler.transfers.has_store


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(make_core):
    """Four requests: one decodes, one has a cut prompt, one loads, one waits."""
    core = make_core(max_num_seqs=3, max_num_batched_tokens=20, connector=Store(prefix="loads"), num_blocks=40)
    core.add("decodes", 5)
    core.step()
    core.add("loads", 12)
    core.add("cut", 30)
    core.add("waits", 6)
    core.step()
    return core


def test_events_count_running_and_waiting_requests(busy):
    scheduler = busy.scheduler
    assert scheduler.get_request_counts() == (2, 2)
    assert scheduler.get_num_unfinished_requests() == 4
    pool = scheduler.kv_cache_manager.pool
    assert pool.usage == 1 - pool.num_free_blocks / 40 > 0
    [first, second] = busy.log.of_type(events.StepScheduled)
    assert (first.num_running, first.num_waiting) == (1, 0)
    assert (second.num_scheduled_tokens, second.num_tokens) == ({"decodes": 1, "cut": 19}, 20)
    assert (second.num_running, second.num_waiting, second.kv_cache_usage) == (2, 2, pool.usage)


def test_num_kept_records_sums_all_components(busy):
    scheduler = busy.scheduler
    assert scheduler._state.builder.num_records == 2
    assert scheduler.transfers.num_records == 3  # a load, and the offers of two requests
    assert scheduler.waiting_requests.num_records == 1
    assert scheduler.num_kept_records == 2 + 3 + 1 + scheduler.kv_cache_manager.num_tracked_requests


def test_block_map_names_holders_of_blocks(busy):
    found = busy.scheduler.block_map()
    assert found.block_size == 4
    assert found.states == busy.scheduler.kv_cache_manager.pool.states()
    requests = busy.scheduler.requests
    assert found.holders == {name: requests[name].sequence.block_table for name in ("decodes", "loads", "cut")}
    assert found.holders["cut"] is not requests["cut"].sequence.block_table


def test_scheduler_has_work_until_every_notice_is_sent(make_core):
    core = make_core(num_blocks=2)
    scheduler = core.scheduler
    assert scheduler.has_work() is False
    core.add("a", 3)
    assert scheduler.has_work() is True
    core.step()
    scheduler.abort_request("a")
    assert scheduler.has_work() is True  # the worker must be notified
    core.step()
    assert scheduler.has_work() is False
    core = make_core(connector=Store(prefix="loads"))
    request = core.add("loads", 12)
    core.step()
    core.scheduler.transfers.cancel(request, "cancelled")
    core.scheduler.requests.clear()
    assert core.scheduler.has_work() is True
    core.scheduler.transfers.take_cancels()
    assert core.scheduler.has_work() is False
    core.scheduler._news.append(object())
    assert core.scheduler.has_work() is True


# --- checks of the state ----------------------------------------------------------------------------------------------


def test_invariants_are_checked_when_idle_every_ten_seconds(make_core):
    clock = Clock()
    core = make_core(num_blocks=4, clock=clock)
    core.add("a", 3)
    assert core.scheduler.check_when_idle() == []
    core.scheduler.abort_request("a")
    core.run()
    pool = core.scheduler.kv_cache_manager.pool
    first, second = pool.take(2)
    clock.now = 3.0
    breaches = core.scheduler.check_when_idle()
    assert [breach.invariant for breach in breaches] == [2, 18]
    ids = (first.block_id, second.block_id)
    messages = [f"invariant {breach.invariant}: {breach.message}" for breach in breaches]
    assert told(core, events.BlocksQuarantined) == [(tuple(sorted(ids)), messages[0]), ((), messages[1])]
    assert [event.time for event in core.log.of_type(events.BlocksQuarantined)] == [3.0, 3.0]
    assert pool.quarantined == set(ids)
    core.scheduler._state.builder._num_sent["gone"] = [1]
    clock.now = 12.9
    assert core.scheduler.check_when_idle() == []
    clock.now = 13.0
    assert [breach.invariant for breach in core.scheduler.check_when_idle()] == [18]


def test_first_idle_check_is_immediate(make_core):
    core = make_core(num_blocks=4, clock=Clock())
    core.scheduler.kv_cache_manager.pool.take(1)
    assert len(core.scheduler.check_when_idle()) == 2


def test_invariants_are_not_checked_while_work_remains(make_core):
    core = make_core(num_blocks=4)
    core.add("a", 3)
    core.scheduler.kv_cache_manager.pool.take(1)
    assert core.scheduler.check_when_idle() == []
    core.scheduler.abort_request("a")
    core.run()
    assert len(core.scheduler.check_when_idle()) == 2


# --- results ----------------------------------------------------------------------------------------------------------


def test_result_of_wrong_step_is_dropped_with_event(make_core):
    clock = Clock()
    core = make_core(clock=clock)
    core.add("a", 3)
    scheduled = core.scheduler.schedule()
    result = core.compute(scheduled)
    clock.now = 4.0
    assert core.scheduler.update_from_output(scheduled, ModelOutput(7, {"a": [1]})) == []
    assert told(core, events.StaleResultDropped) == [("result of step 7 in step 1",)]
    assert core.log.of_type(events.StaleResultDropped)[0].time == 4.0
    assert len(core.scheduler.update_from_output(scheduled, result)) == 1
    assert core.scheduler.update_from_output(scheduled, result) == []
    assert core.scheduler.fail_step(scheduled, "late") == []
    assert core.log.of_type(events.StepFailed) == []


def test_failed_step_emits_event_and_drops_late_result(make_core):
    clock = Clock()
    core = make_core(clock=clock)
    core.add("a", 3)
    scheduled = core.scheduler.schedule()
    clock.now = 2.0
    [output] = core.scheduler.fail_step(scheduled, "out of memory")
    assert (output.request_id, output.error) == ("a", "out of memory")
    assert told(core, events.StepFailed) == [("out of memory",)]
    assert core.log.of_type(events.StepFailed)[0].time == 2.0
    assert core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [1]})) == []


def test_step_time_is_measured_from_schedule_to_result(make_core):
    clock = Clock()
    core = make_core(clock=clock)
    learned = []
    core.scheduler._state.batching.learn = lambda plan, seconds: learned.append((dict(plan.num_tokens), seconds))
    core.add("a", 3)
    clock.now = 5.0
    scheduled = core.scheduler.schedule()
    clock.now = 7.5
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert learned == [({"a": 3}, 2.5)]


# --- a step -----------------------------------------------------------------------------------------------------------


def test_requested_preemption_happens_once_without_beneficiary(make_core):
    core = make_core(policy="priority")
    request = core.add("a", 3)
    core.add("waits", 3)
    core.scheduler.faults.preempt(["a", "unknown"])
    core.step()  # neither request runs
    assert core.log.of_type(events.RequestPreempted) == []
    core.scheduler.faults.preempt(["a"])
    core.step()
    core.step()
    assert request.num_preemptions == 1
    assert told(core, events.RequestPreempted) == [("a", 3, False, "")]
    assert core.log.of_type(events.RequestPreempted)[0].request_id == "a"


def test_preemption_for_blocks_names_beneficiary_and_policy(make_core):
    core = make_core(num_blocks=5, block_size=4, policy="priority")
    core.add("a", 8, max_tokens=9, priority=0)
    core.add("b", 5, max_tokens=9, priority=1)
    core.step()
    core.scheduler.kv_cache_manager.pool.take(1)  # the last free block
    core.step()
    [event] = core.log.of_type(events.RequestPreempted)
    assert (event.request_id, event.beneficiary, event.policy) == ("b", "a", "priority")
    assert (event.num_lost_tokens, event.swapped) == (5, False)


def test_blocked_event_is_emitted_once_per_reason(make_core):
    core = make_core(max_num_seqs=1)
    core.add("a", 3, max_tokens=5)
    core.add("b", 3, max_tokens=1)
    for _ in range(3):
        core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_SEAT,)]
    core.scheduler.faults.preempt(["a"])
    core.step()
    assert [event.request_id for event in core.log.of_type(events.RequestBlocked)] == ["b", "a"]
    assert core.log.of_type(events.RequestBlocked)[1].reason is events.WaitReason.PREEMPTING


def test_blocked_event_names_budget_blocks_or_reservation(make_core):
    core = make_core(max_num_batched_tokens=8)
    core.add("a", 20)
    core.add("b", 3)
    core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_BUDGET,)]
    core = make_core(num_blocks=4)
    core.add("a", 9)
    core.add("b", 9)
    core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_BLOCKS,)]
    core = make_core(num_blocks=4, admission="reservation")
    core.add("a", 3, max_tokens=8)
    core.add("b", 3, max_tokens=8)
    core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_RESERVATION,)]


def test_loads_count_in_max_num_seqs_and_may_wait_for_blocks(make_core):
    core = make_core(connector=Store(prefix="load"), max_num_seqs=2)
    core.add("load a", 12)
    core.add("load b", 12)
    core.add("c", 3)
    core.step()
    assert len(core.scheduler.transfers) == 2
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_SEAT,)]
    core = make_core(connector=Store(num_tokens=12), num_blocks=4)
    core.add("a", 13)
    core.add("b", 13)
    core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_BLOCKS,)]


def test_reserved_load_waits_until_held_blocks_are_released(make_core):
    core = make_core(connector=Store(num_tokens=8, prefix="load"), num_blocks=4, admission="reservation")
    pool = core.scheduler.kv_cache_manager.pool
    held = pool.take(3)  # like saves of ended requests, which no reservation counts
    core.add("load", 12, max_tokens=2)
    assert core.step().kv_transfers == []
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_BLOCKS,)]
    pool.release(held)
    assert len(core.step().kv_transfers) == 1


def test_blocked_event_repeats_if_request_ran_in_between(make_core):
    core = make_core(max_num_seqs=1)
    core.add("b", 3)
    core.step()
    for _ in range(2):
        core.scheduler.faults.preempt(["b"])
        core.step()
        core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.PREEMPTING,)] * 2


def test_first_request_may_be_blocked_by_missing_blocks(make_core):
    core = make_core(num_blocks=4)
    core.scheduler.kv_cache_manager.pool.take(4)
    core.add("a", 3)
    core.step()
    assert told(core, events.RequestBlocked) == [(events.WaitReason.NO_BLOCKS,)]


def test_deferral_emits_parked_and_unparked_events(make_core):
    core = make_core(long_prefill_token_threshold=4)
    prompt = list(range(9))
    core.add("a", prompt)
    core.add("b", prompt)
    core.step()
    core.step()
    assert told(core, events.RequestParked)[0] == ("a",)
    assert core.log.of_type(events.RequestParked)[0].request_id == "b"
    assert told(core, events.RequestUnparked)[0] == (False,)


def test_deferral_times_out_after_16_steps(make_core):
    core = make_core(long_prefill_token_threshold=1, block_size=32)
    core.add("slow", list(range(100)))
    core.add("waits", list(range(100)))
    for _ in range(20):
        core.step()
    [deferred], [unparked] = core.log.of_type(events.RequestParked), core.log.of_type(events.RequestUnparked)
    assert (unparked.request_id, unparked.timed_out) == ("waits", True)
    assert unparked.step - deferred.step == 16


def test_priority_request_is_not_deferred_for_less_important_one(make_core):
    for policy, is_parked in (("priority", False), ("fair", True), ("fcfs", True)):
        core = make_core(policy=policy, ageing_s=None, long_prefill_token_threshold=4)
        core.add("a", list(range(9)), priority=5, tenant="x")
        core.step()
        core.add("b", list(range(9)), priority=0, tenant="y")
        core.step()
        assert bool(core.log.of_type(events.RequestParked)) is is_parked


def test_request_fails_exactly_at_its_deadline(make_core):
    clock = Clock()
    core = make_core(clock=clock)
    request = core.add("a", 3, deadline=5.0)
    clock.now = 4.9
    core.step()
    clock.now = 5.0
    scheduled = core.scheduler.schedule()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert core.scheduler.running == []
    [output] = core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert "deadline" in output.error


def test_load_expires_after_kv_transfer_timeout_s(make_core):
    clock = Clock()
    core = make_core(clock=clock, connector=Store(prefix="loads"), kv_transfer_timeout_s=5.0)
    request = core.add("loads", 12)
    core.step()
    clock.now = 4.9
    core.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    clock.now = 5.0
    scheduled = core.scheduler.schedule()
    assert [event.outcome for event in core.log.of_type(events.KVLoadEnded)] == ["expired"]
    assert request.status is RequestStatus.RUNNING  # computed here, in the same step
    assert scheduled.kv_cancels == [0]


def test_pending_store_lookup_does_not_block_queue(make_core):
    store = Store(None, prefix="loads")
    core = make_core(connector=store, kv_lookup_timeout_s=1e9)
    core.add("loads", 12, max_tokens=2)
    core.add("plain", 5, max_tokens=20)
    assert core.step().num_scheduled_tokens == {"plain": 5}
    assert told(core, events.RequestParked) == [(None,)]
    assert core.scheduler.waiting_requests.num_deferred == 1
    core.step()
    store.num_tokens = 8
    [order] = core.step().kv_transfers
    assert order.request_id == "loads"
    assert [event.timed_out for event in core.log.of_type(events.RequestUnparked)] == [False]


def test_compute_time_per_token_is_learned_with_store(make_core):
    now = [5.0]
    core = make_core(clock=lambda: now[0], connector=Store(0))
    core.add("a", 40)
    scheduled = core.scheduler.schedule()
    now[0] += 2.0
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert core.scheduler.transfers._cost._seconds_per_token == 2.0 / 40


@pytest.mark.parametrize("is_expected", [True, False])
def test_lookup_for_paired_engine_is_limited_by_time_not_steps(make_core, is_expected):
    store = Store(None, "waits")
    core = make_core(connector=store, clock=lambda: 0.0)
    core.add("runs", 4, max_tokens=60)
    pair = KVTransferParams("t") if is_expected else None
    request = core.add("waits", 9, max_tokens=40, kv_transfer_params=pair)
    assert ("added", "waits") in store.told
    for _ in range(40):
        core.step()
    assert (("given up", "waits") in store.told) is not is_expected
    assert (request.status is RequestStatus.WAITING) is is_expected
    store.num_tokens = 8
    core.step()
    assert (request.status is RequestStatus.WAITING_FOR_REMOTE_KVS) is is_expected
