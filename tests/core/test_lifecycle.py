from __future__ import annotations

import pytest

from octavo.core import invariants
from octavo.data import events
from octavo.data.request import RequestStatus


def lifecycle_of(core):
    return core.scheduler._lifecycle


def test_requests_and_running_are_always_the_same_objects(make_core):
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
def test_the_running_stand_by_importance_or_by_arrival(make_core, policy, order):
    core = make_core(policy=policy, ageing_s=None)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        core.add(name, 4, priority=priority)
    core.step()
    assert "".join(request.request_id for request in core.scheduler.running) == order
    core.scheduler.preempt_requests(["b"])
    core.step()
    core.step()
    assert "".join(request.request_id for request in core.scheduler.running) == order


def test_who_gives_way_keeps_its_tokens_and_nothing_else(make_core):
    core = make_core()
    request = core.add("a", 4)
    core.step()
    core.scheduler.update_draft_token_ids({"a": [1, 2]})
    lifecycle_of(core).preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert request.sequence.output_token_ids == [7]
    assert (request.num_computed_tokens, request.spec_token_ids, request.sequence.block_table) == (0, [], [])
    assert (request.num_preemptions, core.scheduler.waiting.peek_request()) == (1, request)
    assert invariants.check(core.scheduler) == []
    assert [data.request_id for data in core.step().scheduled_new_reqs] == ["a"]  # sent whole again


def test_an_admission_is_told_each_time_and_what_the_cache_had_once(make_core):
    core = make_core()
    core.add("a", 9, tenant="t")
    core.step()
    charged = core.scheduler.policy.counters.served("t")
    admitted_time = core.scheduler.requests["a"].admitted_time
    core.scheduler.preempt_requests(["a"])
    core.step()
    core.step()
    assert [event.resumed for event in core.log.of_type(events.RequestAdmitted)] == [False, True]
    assert len(core.log.of_type(events.PrefixCacheQueried)) == 1
    assert core.scheduler.requests["a"].admitted_time == admitted_time
    output_only = core.scheduler.policy.counters.served("t") - charged
    assert output_only < charged


def test_deadlines_are_given_once_in_order_and_only_for_who_lives(make_core):
    core = make_core()
    for name, deadline in (("late", 900.0), ("soon", 500.0), ("gone", 400.0)):
        core.add(name, 4, deadline=deadline)
    core.scheduler.abort_request("gone")
    core.add("gone", 4)  # another one under its name, without a deadline
    lifecycle = lifecycle_of(core)
    assert list(lifecycle.expired(499.0)) == []
    assert [request.request_id for request in lifecycle.expired(900.0)] == ["soon", "late"]
    assert list(lifecycle.expired(900.0)) == []


@pytest.mark.parametrize("status", [status for status in RequestStatus if status.is_finished])
def test_an_ending_frees_everything_and_is_told(make_core, status):
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


def test_an_error_says_what_was_wrong(make_core):
    core = make_core()
    output = lifecycle_of(core).fail(core.add("a", 9), "no numbers")
    assert (output.finish_reason, output.error) == ("error", "no numbers")
