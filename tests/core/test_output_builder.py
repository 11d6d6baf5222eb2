"""What the worker is sent: a request in full once, then only changes."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import SchedulerConfig
from octavo.core.event_emitter import EventEmitter
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv_connector import NullConnector
from octavo.core.output_builder import OutputBuilder
from octavo.core.step_plan import StepPlan
from octavo.core.transfer_scheduler import KVTransferScheduler
from octavo.data.events import EventLog
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


class Builder:
    def __init__(self):
        self.manager = KVCacheManager(16, 4)
        self.transfers = KVTransferScheduler(
            NullConnector(), self.manager, SchedulerConfig().resolved(), EventEmitter(EventLog())
        )
        self.builder = OutputBuilder(self.manager, self.transfers)
        self.requests = {name: Request(name, [1, 2, 3], SamplingParams()) for name in "ab"}
        self.step = 0

    def build(self, counts):
        plan = StepPlan(100, 100)
        for name, count in counts.items():
            plan.give(self.requests[name], count)
        self.step += 1
        return self.builder.build(self.step, plan, self.requests, {})


@pytest.fixture
def made():
    return Builder()


def test_preempted_request_is_sent_completely_again(made):
    request = made.requests["a"]
    output = made.build({"a": 3})
    assert [data.request_id for data in output.scheduled_new_reqs] == ["a"]
    assert output.scheduled_cached_reqs.req_ids == []
    assert (output.step, output.num_scheduled_tokens, output.total_num_scheduled_tokens) == (1, {"a": 3}, 3)
    request.sequence.token_ids += [7, 8]
    request.num_computed_tokens = 3
    request.sequence.block_table.append(5)
    made.manager.grown.add("a")
    output = made.build({"a": 2, "b": 3})
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids) == (["a"], [[[5]]])
    assert made.manager.grown == set()
    assert cached.num_computed_tokens == [3]
    assert [data.request_id for data in output.scheduled_new_reqs] == ["b"]
    assert output.total_num_scheduled_tokens == 5
    assert made.build({"a": 1}).scheduled_cached_reqs.req_ids == ["a"]
    assert made.builder.num_records == 2
    made.builder.preempted("a")
    made.builder.preempted("a")
    assert made.builder.num_records == 1
    assert [data.request_id for data in made.build({"a": 5}).scheduled_new_reqs] == ["a"]


@pytest.mark.parametrize(("count", "expected"), [(1, {}), (2, {"a": [4]}), (3, {"a": [4, 5]}), (4, {"a": [4, 5, 6]})])
def test_drafts_are_cut_to_scheduled_tokens(made, count, expected):
    request = made.requests["a"]
    request.num_computed_tokens = 2
    request.spec_token_ids = [4, 5, 6]
    assert made.build({"b": 3, "a": count}).scheduled_spec_decode_tokens == expected


def test_drafts_are_sent_after_request_without_drafts(made):
    made.requests["b"].num_computed_tokens = 2
    made.requests["b"].spec_token_ids = [9]
    assert made.build({"a": 3, "b": 2}).scheduled_spec_decode_tokens == {"b": [9]}


def test_finished_ids_are_sent_once_and_again_after_failed_step(made):
    made.build({"a": 3, "b": 3})
    assert not made.builder.has_endings
    made.builder.finished("a")
    assert made.builder.has_endings
    assert made.builder.num_records == 1
    output = made.build({})
    assert output.finished_req_ids == {"a"}
    assert not made.builder.has_endings
    assert made.build({}).finished_req_ids == set()
    plan = StepPlan(9, 9)
    plan.preempted["b"] = made.requests["b"]
    made.builder.finished("a")
    output = made.builder.build(9, plan, made.requests, {})
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, {"b"})
    made.builder.finished("c")
    made.builder.fail_step(output)
    assert made.build({}).finished_req_ids == {"a", "b", "c"}


def test_step_output_includes_copies_and_transfers(made):
    request = made.requests["a"]
    made.manager.allocate_slots(request, 3)
    other = Request("other", [1, 2, 3], SamplingParams())
    made.transfers.start_load(request, made.manager.get_computed_blocks(other), 4)
    [told] = made.transfers.take_orders()
    made.transfers.start_load(other, made.manager.get_computed_blocks(other), 4)
    made.transfers.cancel(request, "cancelled")
    plan = StepPlan(9, 9)
    request.num_computed_tokens = 3
    made.manager.commit(request)
    same = Request("same", [1, 2, 3], SamplingParams())
    made.manager.allocate_slots(same, 1, made.manager.get_computed_blocks(same))
    output = made.builder.build(1, plan, made.requests, {})
    assert [each.request_id for each in output.kv_transfers] == ["other"]
    assert (output.kv_cancels, output.num_pending_transfers) == ([told.transfer_id], 1)
    assert len(output.copies.block_copies) == 1
    assert not made.build({}).copies


def test_scheduled_request_is_sent_completely_once_and_then_as_changes(make_core):
    core = make_core()
    core.add("a", 4)
    first = core.step()
    assert [(data.request_id, len(data.token_ids), data.block_ids) for data in first.scheduled_new_reqs] == [
        ("a", 4, [[0]])
    ]
    assert first.scheduled_cached_reqs.req_ids == []
    cached = core.step().scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens) == (["a"], [4])
    assert cached.new_block_ids == [[[1]]]
    assert core.step().scheduled_cached_reqs.new_block_ids == [[[]]]


def test_sent_request_data_is_copy(make_core):
    core = make_core()
    request = core.add("a", 4)
    [data] = core.scheduler.schedule().scheduled_new_reqs
    request.sequence.token_ids.append(99)
    request.sequence.block_table.append(99)
    assert (len(data.token_ids), data.block_ids) == (4, [[0]])


def test_drafts_are_cut_to_step_budget(make_core):
    core = make_core(max_num_batched_tokens=4, max_num_seqs=2)
    core.add("a", 2, max_tokens=50)
    core.add("b", 2, max_tokens=50)
    core.step()
    core.guess({"a": [1, 2, 3, 4], "b": [5, 6]})
    scheduled = core.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"a": 3, "b": 1}
    assert scheduled.scheduled_spec_decode_tokens == {"a": [1, 2]}


def test_scheduler_resends_finished_ids_after_failed_step(make_core):
    core = make_core()
    core.add("a", 4)
    core.step()
    core.scheduler.abort_request("a")
    scheduled = core.scheduler.schedule()
    assert scheduled.finished_req_ids == {"a"}
    core.scheduler.fail_step(scheduled, "broken")
    assert not core.scheduler.has_work()  # no step only for the notice: it would fail again if the worker is broken
    core.add("b", 4, max_tokens=1)
    assert core.step().finished_req_ids == {"a"}
    assert core.scheduler.has_work()  # the step with tokens has succeeded: notices justify a step again
    assert core.step().finished_req_ids == {"b"}
    assert core.scheduler.schedule().is_empty
    assert not core.scheduler.has_work()


def test_step_without_tokens_only_waits_for_transfers(make_core):
    core = make_core(connector=Store(prefix="loads"))
    core.add("runs", 4, max_tokens=2)
    assert not core.step().only_waits_for_transfers
    core.add("loads", 12)
    scheduled = core.step()
    assert (scheduled.num_scheduled_tokens, scheduled.num_pending_transfers) == ({"runs": 1}, 1)
    assert not scheduled.only_waits_for_transfers
    assert core.step().only_waits_for_transfers


def test_notices_of_aborted_request_are_due_before_any_step(make_core):
    core = make_core()
    core.add("a", 4)
    core.scheduler.abort_request("a")
    assert core.scheduler.has_work()
    assert core.step().finished_req_ids == {"a"}
    assert not core.scheduler.has_work()


def test_pending_save_needs_steps_after_step_without_tokens_failed(make_core):
    """Only a step reports the end of a transfer: without one the pinned blocks would never be released."""
    core = make_core(connector=Store(0, wants=True))
    core.add("a", 12, max_tokens=1)
    core.step()
    assert core.step().kv_transfers
    scheduled = core.scheduler.schedule()
    assert (scheduled.num_scheduled_tokens, scheduled.num_pending_transfers) == ({}, 1)
    core.scheduler.fail_step(scheduled, "broken")
    assert core.scheduler.get_num_transfers() == 1
    assert core.scheduler.has_work()


# --- recurrent states -------------------------------------------------------------------------------------------------


def saves_of(core, count):
    """Run steps; return the saves of each."""
    return [core.step().state_saves for _ in range(count)]


def test_states_are_saved_in_steps_that_reach_them(make_core):
    core = make_core(num_state_slots=9, state_checkpoint_interval=8, max_num_batched_tokens=10)
    core.add("a", 26, max_tokens=3)
    assert saves_of(core, 4) == [{"a": [(8, 1)]}, {"a": [(16, 2)]}, {"a": [(24, 3)]}, {}]


def test_requests_in_one_step_save_to_different_slots(make_core):
    core = make_core(num_state_slots=9, state_checkpoint_interval=4)
    core.add("a", 9)
    core.add("b", 5)
    core.add("c", 4)
    assert saves_of(core, 1) == [{"a": [(4, 3), (8, 4)], "b": [(4, 5)], "c": [(4, 6)]}]


def test_state_after_drafts_is_not_saved_before_they_are_accepted(make_core):
    """The state after 12 tokens may be saved by the step after the one that computed them as drafts."""
    core = make_core(num_state_slots=9)
    core.add("a", 9, max_tokens=50)
    assert saves_of(core, 1) == [{"a": [(8, 1)]}]
    core.guess({"a": [7, 7, 7]})
    scheduled = core.scheduler.schedule()
    assert (scheduled.num_scheduled_tokens, scheduled.state_saves) == ({"a": 4}, {})
    core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [7, 7, 7, 7]}))
    scheduled = core.scheduler.schedule()
    assert scheduled.scheduled_cached_reqs.num_computed_tokens == [13]
    assert scheduled.state_saves == {"a": [(12, 2)]}


def test_state_after_newest_token_is_saved_with_drafts(make_core):
    core = make_core(num_state_slots=9)
    core.add("a", 9, max_tokens=50)
    for _ in range(3):
        core.step()
    core.guess({"a": [7, 7, 7, 7]})
    scheduled = core.scheduler.schedule()
    assert (scheduled.num_scheduled_tokens, scheduled.state_saves) == ({"a": 5}, {"a": [(12, 2)]})


def test_step_saves_no_state_without_recurrent_layers(make_core):
    core = make_core()
    core.add("a", 9, cache_points=(5,))
    assert saves_of(core, 4) == [{}] * 4


def test_states_of_failed_step_are_not_found(make_core):
    core = make_core(num_state_slots=9)
    core.add("a", list(range(9)))
    scheduled = core.scheduler.schedule()
    assert scheduled.state_saves == {"a": [(8, 1)]}
    core.scheduler.fail_step(scheduled, "broken")
    core.add("b", list(range(9)))
    scheduled = core.step()
    assert (scheduled.num_scheduled_tokens, scheduled.copies.block_copies) == ({"b": 9}, [])
    assert scheduled.state_saves == {"b": [(8, 1)]}
    core.add("c", list(range(9)))
    assert core.step().num_scheduled_tokens["c"] == 1
