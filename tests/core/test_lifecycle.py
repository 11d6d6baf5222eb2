"""How a request is queued, admitted, preempted and ended, and which events report it."""

from __future__ import annotations

import random

import pytest
from stores import Store

from octavo.core import invariants
from octavo.data import events
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.request import Request, RequestStatus
from octavo.sampling_params import SamplingParams


def lifecycle_of(core):
    return core.scheduler._lifecycle


def test_added_request_gets_arrival_index_and_queued_event(make_core):
    core = make_core()
    requests = [core.add(name, count, priority=4, tenant="t", arrival_time=2.5) for name, count in (("a", 3), ("b", 5))]
    assert [request.arrival_index for request in requests] == [0, 1]
    told = core.log.of_type(events.RequestQueued)
    assert [(e.request_id, e.num_prompt_tokens, e.priority, e.tenant) for e in told] == [
        ("a", 3, 4, "t"),
        ("b", 5, 4, "t"),
    ]
    assert [(e.num_ahead, e.arrival_time) for e in told] == [(0, 2.5), (1, 2.5)]


@pytest.mark.parametrize("count", [100, 101])
def test_deadlines_of_finished_requests_are_pruned(make_core, count):
    core = make_core()
    for index in range(count):
        core.add(f"r{index}", 3, deadline=1e6 - index)
    for index in range(18, count):
        core.scheduler.abort_request(f"r{index}")
    deadlines = lifecycle_of(core)._deadlines
    assert len(deadlines) == count
    core.add("next", 3, deadline=2e6)  # 19 requests are alive: 102 entries may be kept
    assert len(lifecycle_of(core)._deadlines) == (101 if count == 100 else 102)
    core.scheduler.abort_request("r0")
    core.add("last", 3, deadline=3e6)
    assert len(lifecycle_of(core)._deadlines) == (102 if count == 100 else 19)


def test_deadlines_expire_in_order_after_many_aborts(make_core):
    core = make_core()
    lifecycle = lifecycle_of(core)
    rng = random.Random(1)
    deadlines = {f"r{index}": float(rng.randrange(1000)) for index in range(200)}
    for name, deadline in deadlines.items():
        core.add(name, 3, deadline=deadline)
    for index in range(140):
        core.scheduler.abort_request(f"r{index}")
    core.add("r0", 3, deadline=5000.0)  # another request with the same id
    left = sorted((deadlines[f"r{index}"], index) for index in range(140, 200))
    assert [request.request_id for request in lifecycle.expired(999.0)] == [f"r{index}" for _, index in left]
    assert list(lifecycle.expired(4999.0)) == []
    assert [request.request_id for request in lifecycle.expired(5000.0)] == ["r0"]
    assert list(lifecycle.expired(9999.0)) == []


def test_admission_reports_prefix_hit_and_charges_uncached_tokens(make_core):
    core = make_core(policy="fair", fair_input_weight=1.0)
    prompt = list(range(9))
    core.add("first", prompt, max_tokens=1, tenant="other")
    core.run()
    core.add("keeps the counters", 5, max_tokens=40, tenant="other")
    request = core.add("a", prompt, max_tokens=30, tenant="t", tenant_weight=2.0)
    before = core.scheduler.policy.counters.served("t")
    core.scheduler.schedule()
    assert core.scheduler.policy.counters.served("t") - before == (9 - 8) / 2
    admitted = [e for e in core.log.of_type(events.RequestAdmitted) if e.request_id == "a"]
    assert [(e.num_cached_tokens, e.num_tokens, e.resumed) for e in admitted] == [(8, 9, False)]
    [queried] = [e for e in core.log.of_type(events.PrefixCacheQueried) if e.request_id == "a"]
    assert (queried.num_query_tokens, queried.num_hit_tokens, queried.miss, queried.position) == (9, 8, None, None)
    assert request.admitted_time == admitted[0].time
    assert request.num_computed_tokens == 8


def test_resumed_request_is_not_charged_or_counted_again(make_core):
    core = make_core(policy="fair")
    request = core.add("a", 9, max_tokens=30, tenant="t")
    core.step()
    first = request.admitted_time
    core.scheduler.faults.preempt(["a"])
    core.step()
    assert (request.status, request.num_preemptions, request.num_computed_tokens) == (RequestStatus.PREEMPTED, 1, 0)
    served = core.scheduler.policy.counters.served("t")
    core.scheduler.schedule()
    assert core.scheduler.policy.counters.served("t") == served
    assert request.admitted_time == first
    assert [event.resumed for event in core.log.of_type(events.RequestAdmitted)] == [False, True]
    assert len(core.log.of_type(events.PrefixCacheQueried)) == 1


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"prompt_logprobs": 1}])
def test_request_without_cache_lookup_emits_no_cache_query(make_core, options):
    caching = options.pop("enable_prefix_caching", True)
    core = make_core(enable_prefix_caching=caching)
    core.add("a", 9, **options)
    core.step()
    assert core.log.of_type(events.PrefixCacheQueried) == []
    assert len(core.log.of_type(events.RequestAdmitted)) == 1


def test_running_list_is_sorted_by_priority_but_not_by_fair_share(make_core):
    for policy, expected in (("priority", ["c", "b", "a"]), ("fair", ["a", "b", "c"])):
        core = make_core(policy=policy, ageing_s=None)
        for name, priority in (("a", 3), ("b", 2), ("c", 1)):
            core.add(name, 3, priority=priority, tenant=name)
            core.step()
        assert [request.request_id for request in core.scheduler.running] == expected


def test_preempted_request_keeps_tokens_and_loses_blocks_and_drafts(make_core):
    core = make_core()
    request = core.add("a", 9)
    core.add("b", 5)
    core.step()
    request.spec_token_ids = [1, 2]
    core.scheduler.faults.preempt(["a"])
    scheduled = core.scheduler.schedule()
    assert scheduled.preempted_req_ids == {"a"}
    assert (request.status, request.num_computed_tokens, request.spec_token_ids) == (RequestStatus.PREEMPTED, 0, [])
    assert (request.num_preemptions, len(request.sequence.token_ids), request.sequence.block_table) == (1, 10, [])
    assert [each.request_id for each in core.scheduler.running] == ["b"]
    assert [each.request_id for each in core.scheduler.waiting_requests] == ["a"]
    assert invariants.check(core.scheduler) == []


def test_request_with_failed_load_returns_to_queue_with_previous_status(make_core):
    core = make_core(connector=Store(), admission="reservation", max_batch_prefill_tokens=50)
    request = core.add("a", 12)
    core.scheduler.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    [admitted] = core.log.of_type(events.RequestAdmitted)  # it was admitted
    assert (admitted.request_id, request.admitted_time) == ("a", admitted.time)
    assert core.scheduler.admission.num_reserved_total == 28
    lifecycle = lifecycle_of(core)
    for num_preemptions, status in ((0, RequestStatus.WAITING), (1, RequestStatus.PREEMPTED)):
        request.num_preemptions = num_preemptions
        request.num_computed_tokens = 4
        if num_preemptions:
            core.scheduler.waiting_requests.take()
        lifecycle.abandon_loading(request)
        assert (request.status, request.num_computed_tokens) == (status, 0)
        assert request.sequence.block_table == []
        assert core.scheduler.admission.num_reserved_total == 0
        assert [each.request_id for each in core.scheduler.waiting_requests] == ["a"]


def test_loaded_blocks_are_shared_immediately(make_core):
    core = make_core(connector=Store())
    prompt = list(range(12))
    core.add("a", prompt)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    result = core.compute(scheduled)
    result.kv_transfers.append(EndedTransfer(order.transfer_id, 2))
    core.scheduler.update_from_output(scheduled, result)
    assert core.scheduler.requests["a"].status is RequestStatus.RUNNING
    assert core.scheduler.requests["a"].num_computed_tokens == 8
    assert core.scheduler.requests["a"].sequence.num_cached_tokens == 8
    manager = core.scheduler.kv_cache_manager
    assert manager.get_computed_blocks(Request("b", prompt, SamplingParams())).num_tokens == 8


def test_load_of_preempted_request_is_not_counted_as_cached_prompt(make_core):
    store = Store(num_tokens=0)
    core = make_core(connector=store)
    core.add("a", list(range(12)))
    core.step()
    core.scheduler.faults.preempt(["a"])
    core.step()
    core.scheduler.kv_cache_manager.reset_prefix_cache()
    store.num_tokens = 8
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    result = core.compute(scheduled)
    result.kv_transfers.append(EndedTransfer(order.transfer_id, 2))
    core.scheduler.update_from_output(scheduled, result)
    request = core.scheduler.requests["a"]
    assert (request.num_computed_tokens, request.sequence.num_cached_tokens) == (8, 0)


@pytest.mark.parametrize("state", ["waiting", "running", "loading"])
def test_abort_in_any_state_removes_all_records_of_request(make_core, state):
    store = Store() if state == "loading" else None
    core = make_core(connector=store, admission="reservation", policy="fair")
    request = core.add("a", 12, tenant="t")
    if state != "waiting":
        core.step()
    request.spec_token_ids = [1]
    table = list(request.sequence.block_table)
    [output] = core.scheduler.finish_requests(["a", "unknown"], RequestStatus.FINISHED_ABORTED)
    assert (output.request_id, output.finish_reason, output.error) == ("a", "abort", None)
    assert (request.status, request.spec_token_ids) == (RequestStatus.FINISHED_ABORTED, [])
    assert core.scheduler.requests == {}
    assert core.scheduler.running == []
    assert core.scheduler.admission.num_reserved_total == 0
    assert core.scheduler.num_kept_records == 0
    assert core.scheduler.policy.counters.served("t") == 0.0  # no request remains: counters start again
    [told] = core.log.of_type(events.RequestFinished)
    assert (told.request_id, told.reason, told.num_output_tokens) == ("a", "abort", int(state == "running"))
    if store is not None:
        assert store.told[-1] == ("finished", "a", table)
        assert [event.outcome for event in core.log.of_type(events.KVLoadEnded)] == ["cancelled"]
    scheduled = core.scheduler.schedule()
    assert scheduled.finished_req_ids == {"a"}
    assert len(scheduled.kv_cancels) == (state == "loading")


def test_fair_counters_remain_while_any_request_exists(make_core):
    core = make_core(policy="fair")
    core.add("a", 12, tenant="t")
    core.add("b", 12, tenant="u")
    core.step()
    core.scheduler.abort_request("a")
    assert core.scheduler.policy.counters.served("t") > 0


def test_requests_and_running_remain_same_objects(make_core):
    core = make_core()
    requests, running = core.scheduler.requests, core.scheduler.running
    for name in "abc":
        core.add(name, 4, max_tokens=3)
    core.step()
    assert [request.request_id for request in running] == ["a", "b", "c"]
    core.scheduler.abort_request("b")
    assert [request.request_id for request in running] == list(requests) == ["a", "c"]
    core.run()
    assert (core.scheduler.requests, core.scheduler.running) == (requests, running) == ({}, [])
    assert core.scheduler.running is running
    assert core.scheduler.requests is requests


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abc"), ("priority", "bca")])
def test_running_list_keeps_policy_order_after_preemption(make_core, policy, order):
    core = make_core(policy=policy, ageing_s=None)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        core.add(name, 4, priority=priority)
    core.step()
    assert "".join(request.request_id for request in core.scheduler.running) == order
    core.scheduler.faults.preempt(["b"])
    core.step()
    core.step()
    assert "".join(request.request_id for request in core.scheduler.running) == order


def test_preempted_request_is_queued_first_and_sent_completely_again(make_core):
    core = make_core()
    request = core.add("a", 4)
    core.step()
    core.guess({"a": [1, 2]})
    lifecycle_of(core).preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert request.sequence.output_token_ids == [7]
    assert (request.num_computed_tokens, request.spec_token_ids, request.sequence.block_table) == (0, [], [])
    assert (request.num_preemptions, core.scheduler.waiting.peek_request()) == (1, request)
    assert invariants.check(core.scheduler) == []
    assert [data.request_id for data in core.step().scheduled_new_reqs] == ["a"]  # all of it is sent again


def test_resumed_request_emits_second_admission_but_no_second_cache_query(make_core):
    core = make_core()
    core.add("a", 9, tenant="t")
    core.step()
    charged = core.scheduler.policy.counters.served("t")
    admitted_time = core.scheduler.requests["a"].admitted_time
    core.scheduler.faults.preempt(["a"])
    core.step()
    core.step()
    assert [event.resumed for event in core.log.of_type(events.RequestAdmitted)] == [False, True]
    assert len(core.log.of_type(events.PrefixCacheQueried)) == 1
    assert core.scheduler.requests["a"].admitted_time == admitted_time
    output_only = core.scheduler.policy.counters.served("t") - charged
    assert output_only < charged


def test_deadlines_expire_once_and_only_for_live_requests(make_core):
    core = make_core()
    for name, deadline in (("late", 900.0), ("soon", 500.0), ("gone", 400.0)):
        core.add(name, 4, deadline=deadline)
    core.scheduler.abort_request("gone")
    core.add("gone", 4)  # another request with this id, without a deadline
    lifecycle = lifecycle_of(core)
    assert list(lifecycle.expired(499.0)) == []
    assert [request.request_id for request in lifecycle.expired(900.0)] == ["soon", "late"]
    assert list(lifecycle.expired(900.0)) == []


@pytest.mark.parametrize("status", [status for status in RequestStatus if status.is_finished])
def test_every_finish_status_frees_all_blocks_and_is_reported(make_core, status):
    core = make_core()
    request = core.add("a", 9)
    core.step()
    output = lifecycle_of(core).end(request, status)
    lifecycle_of(core).drop_finished()
    assert (output.request_id, output.finish_reason, output.new_token_ids) == ("a", status.finish_reason, [])
    assert request.status is status
    assert core.scheduler.schedule().finished_req_ids == {"a"}
    assert [event.reason for event in core.log.of_type(events.RequestFinished)] == [status.finish_reason]
    assert core.scheduler.num_kept_records == 0
    pool = core.scheduler.kv_cache_manager.pool
    assert pool.num_free_blocks == pool.num_blocks


def test_failed_request_returns_its_error_message(make_core):
    core = make_core()
    output = lifecycle_of(core).fail(core.add("a", 9), "no numbers")
    assert (output.finish_reason, output.error) == ("error", "no numbers")
