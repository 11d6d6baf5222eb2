"""What the worker is sent: all of a request once, then what is new."""

from __future__ import annotations

import pytest

from octavo.core.event_emitter import EventEmitter
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_connector import NullConnector
from octavo.core.kv_transfers import KVTransfers
from octavo.core.output_builder import OutputBuilder
from octavo.core.step_plan import StepPlan
from octavo.events import EventLog
from octavo.request import Request
from octavo.sampling_params import SamplingParams


class Builder:
    def __init__(self):
        self.manager = KVCacheManager(16, 4)
        self.transfers = KVTransfers(NullConnector(), self.manager, 5.0, EventEmitter(EventLog()))
        self.builder = OutputBuilder(self.manager, self.transfers)
        self.requests = {name: Request(name, [1, 2, 3], SamplingParams()) for name in "ab"}
        self.step = 0

    def build(self, counts, block_ids=None):
        plan = StepPlan(100)
        for name, count in counts.items():
            plan.give(self.requests[name], count, (block_ids or {}).get(name, []))
        self.step += 1
        return self.builder.build(self.step, plan, self.requests)


@pytest.fixture
def made():
    return Builder()


def test_a_request_is_sent_whole_then_what_is_new_and_whole_again_behind_a_preemption(made):
    request = made.requests["a"]
    output = made.build({"a": 3})
    assert [data.request_id for data in output.scheduled_new_reqs] == ["a"]
    assert output.scheduled_cached_reqs.req_ids == []
    assert (output.step, output.num_scheduled_tokens, output.total_num_scheduled_tokens) == (1, {"a": 3}, 3)
    request.sequence.token_ids += [7, 8]
    request.num_computed_tokens = 3
    output = made.build({"a": 2, "b": 3}, {"a": [5]})
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_token_ids, cached.new_block_ids) == (["a"], [[7, 8]], [[5]])
    assert cached.num_computed_tokens == [3]
    assert [data.request_id for data in output.scheduled_new_reqs] == ["b"]
    assert output.total_num_scheduled_tokens == 5
    assert made.build({"a": 1}).scheduled_cached_reqs.new_token_ids == [[]]
    assert made.builder.num_records == 2
    made.builder.preempted("a")
    made.builder.preempted("a")
    assert made.builder.num_records == 1
    assert [data.request_id for data in made.build({"a": 5}).scheduled_new_reqs] == ["a"]


@pytest.mark.parametrize(("count", "expected"), [(1, {}), (2, {"a": [4]}), (3, {"a": [4, 5]}), (4, {"a": [4, 5, 6]})])
def test_drafts_are_sent_as_far_as_they_were_given_tokens(made, count, expected):
    request = made.requests["a"]
    request.num_computed_tokens = 2
    request.spec_token_ids = [4, 5, 6]
    assert made.build({"b": 3, "a": count}).scheduled_spec_decode_tokens == expected


def test_who_has_no_drafts_does_not_keep_others_from_theirs(made):
    made.requests["b"].num_computed_tokens = 2
    made.requests["b"].spec_token_ids = [9]
    assert made.build({"a": 3, "b": 2}).scheduled_spec_decode_tokens == {"b": [9]}


def test_endings_are_told_once_and_again_where_a_step_failed(made):
    made.build({"a": 3, "b": 3})
    assert not made.builder.has_endings
    made.builder.finished("a")
    assert made.builder.has_endings
    assert made.builder.num_records == 1
    output = made.build({})
    assert output.finished_req_ids == {"a"}
    assert not made.builder.has_endings
    assert made.build({}).finished_req_ids == set()
    plan = StepPlan(9)
    plan.preempted["b"] = made.requests["b"]
    made.builder.finished("a")
    output = made.builder.build(9, plan, made.requests)
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, {"b"})
    made.builder.finished("c")
    made.builder.fail_step(output)
    assert made.build({}).finished_req_ids == {"a", "b", "c"}


def test_copies_and_transfers_go_with_the_step(made):
    request = made.requests["a"]
    block_ids = made.manager.allocate_slots(request, 3)
    other = Request("other", [1, 2, 3], SamplingParams())
    order = made.transfers.start(request, made.manager.get_computed_blocks(other), 2, block_ids)
    made.transfers.start(other, made.manager.get_computed_blocks(other), 2, block_ids)
    made.transfers.cancel(request, "cancelled")
    plan = StepPlan(9)
    plan.kv_loads.append(order)
    request.num_computed_tokens = 3
    made.manager.commit(request)
    same = Request("same", [1, 2, 3], SamplingParams())
    made.manager.allocate_slots(same, 1, made.manager.get_computed_blocks(same))
    output = made.builder.build(1, plan, made.requests)
    assert (output.kv_loads, output.kv_cancels, output.num_pending_loads) == ([order], [order.transfer_id], 1)
    assert len(output.copies.block_copies) == 1
    assert not made.build({}).copies
