"""Steps decided ahead of results: predicted outcomes, requests that may not continue, and failures."""

from __future__ import annotations

import pytest

from octavo.core import invariants
from octavo.core.steps_in_flight import UNKNOWN_TOKEN
from octavo.data import events
from octavo.data.model_output import ModelOutput
from octavo.data.request import RequestStatus
from octavo.sampling_params import StructuredOutputsParams


@pytest.fixture
def make_ahead(make_core):
    """Make a core that may decide steps ahead."""
    return lambda **options: make_core(async_scheduling=True, **options)


def decided(core):
    """Decide a step; if one is in flight, looking ahead must be allowed."""
    assert core.scheduler.in_flight is None or core.scheduler.may_look_ahead()
    return core.scheduler.schedule()


def answer(core, scheduled, tokens=None, **fields):
    """Process a step's result. tokens: default a 7 for each request that is due one."""
    result = core.compute(scheduled) if tokens is None else ModelOutput(scheduled.step, tokens, **fields)
    return core.scheduler.update_from_output(scheduled, result)


def state(request):
    return list(request.sequence.token_ids), request.num_computed_tokens


# --- predicted outcomes -----------------------------------------------------------------------------------------------


def test_next_step_is_scheduled_before_sampled_token_arrives(make_ahead):
    core = make_ahead()
    request = core.add("a", 5)
    first = decided(core)
    before = state(request)
    second = decided(core)
    assert state(request) == before, "what was expected is taken back"
    assert (second.num_scheduled_tokens, second.scheduled_cached_reqs.num_computed_tokens) == ({"a": 1}, [5])
    assert second.scheduled_cached_reqs.new_block_ids == [[[]]]
    [output] = answer(core, first, {"a": [8]})
    assert output.new_token_ids == [8]
    third = decided(core)
    assert third.scheduled_cached_reqs.num_computed_tokens == [6]
    [output] = answer(core, second, {"a": [9]})
    assert (output.new_token_ids, request.num_computed_tokens) == ([9], 6)
    assert UNKNOWN_TOKEN not in request.sequence.token_ids
    assert invariants.check(core.scheduler) == []


def test_prompt_continues_after_chunk_in_flight(make_ahead):
    core = make_ahead(max_num_batched_tokens=4, max_num_seqs=2)
    core.add("a", 10)
    steps = [decided(core)]
    for expected in (4, 2, 1, 1):
        steps.append(decided(core))
        assert steps[-1].num_scheduled_tokens == {"a": expected}
        answer(core, steps.pop(0))
    assert core.scheduler.requests["a"].sequence.output_token_ids == [7, 7]


def test_request_ending_by_length_is_not_scheduled_ahead(make_ahead):
    core = make_ahead()
    core.add("short", 5, max_tokens=1)
    core.add("long", 5, max_tokens=3)
    first, second = decided(core), decided(core)
    assert second.num_scheduled_tokens == {"long": 1}
    answer(core, first)
    third = decided(core)
    assert (third.num_scheduled_tokens, third.finished_req_ids) == ({"long": 1}, {"short"})
    answer(core, second)
    assert core.scheduler.in_flight is third
    assert not core.scheduler.may_look_ahead(), "nobody goes on"
    answer(core, third)
    assert core.scheduler.in_flight is None
    assert [event.request_id for event in core.log.of_type(events.RequestFinished)] == ["short", "long"]


def test_stop_token_wastes_one_row_and_emits_no_extra_token(make_ahead):
    core = make_ahead()
    request = core.add("a", 5, stop_token_ids=[9])
    core.add("b", 5)
    first, second = decided(core), decided(core)
    outputs = answer(core, first, {"a": [9], "b": [7]})
    assert [(each.request_id, each.finish_reason) for each in outputs] == [("a", "stop"), ("b", None)]
    assert second.num_scheduled_tokens == {"a": 1, "b": 1}
    third = decided(core)
    assert (third.num_scheduled_tokens, third.finished_req_ids) == ({"b": 1}, {"a"})
    [output] = answer(core, second, {"a": [3], "b": [7]})
    assert output.request_id == "b"
    assert request.sequence.output_token_ids == [9]
    assert invariants.check(core.scheduler) == []


def test_reused_request_id_gets_no_token_of_aborted_request(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    core.add("b", 5)
    first, second = decided(core), decided(core)
    core.scheduler.abort_request("a")
    request = core.add("a", list(range(6)))
    assert [each.request_id for each in answer(core, first, {"a": [3], "b": [7]})] == ["b"]
    third = decided(core)
    assert (third.finished_req_ids, third.num_scheduled_tokens) == ({"a"}, {"b": 1, "a": 6})
    assert [each.request_id for each in answer(core, second, {"a": [4], "b": [7]})] == ["b"]
    [_, output] = answer(core, third, {"a": [5], "b": [7]})
    assert (output.new_token_ids, request.sequence.output_token_ids) == ([5], [5])


def test_new_request_starts_in_step_scheduled_ahead(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first = decided(core)
    core.add("b", 4)
    second = decided(core)
    assert second.num_scheduled_tokens == {"a": 1, "b": 4}
    assert [data.request_id for data in second.scheduled_new_reqs] == ["b"]
    answer(core, first)
    [of_a, of_b] = answer(core, second)
    assert (of_a.request_id, of_b.request_id) == ("a", "b")


@pytest.mark.parametrize("token", [0, 1, UNKNOWN_TOKEN])
def test_known_token_is_not_mistaken_for_placeholder(make_ahead, token):
    core = make_ahead(max_num_batched_tokens=4, max_num_seqs=2)
    request = core.add("a", [5, 5, 5, 5, 5, token])
    first, _ = decided(core), decided(core)
    assert state(request) == ([5, 5, 5, 5, 5, token], 0)
    answer(core, first)
    assert state(request) == ([5, 5, 5, 5, 5, token], 4)


# --- when nothing is decided ahead ------------------------------------------------------------------------------------


def test_scheduling_ahead_is_off_by_default(make_core):
    core = make_core()
    core.add("a", 5)
    core.scheduler.schedule()
    assert not core.scheduler.may_look_ahead()
    with pytest.raises(AssertionError, match="has not arrived"):
        core.scheduler.schedule()


def test_at_most_one_step_is_scheduled_ahead(make_ahead):
    core = make_ahead()
    assert not core.scheduler.may_look_ahead()
    core.add("a", 5)
    assert not core.scheduler.may_look_ahead()
    decided(core)
    decided(core)
    assert not core.scheduler.may_look_ahead()


def test_no_step_is_scheduled_ahead_of_empty_step(make_ahead):
    core = make_ahead()
    core.add("a", 5, max_tokens=1)
    answer(core, decided(core))
    core.add("b", 5)
    core.scheduler.abort_request("b")
    assert decided(core).finished_req_ids == {"a", "b"}
    core.add("c", 5)
    assert not core.scheduler.may_look_ahead()


def test_prompt_with_max_tokens_1_continues_in_step_scheduled_ahead(make_ahead):
    core = make_ahead(max_num_batched_tokens=4, max_num_seqs=2)
    core.add("a", 6, max_tokens=1)
    decided(core)
    assert decided(core).num_scheduled_tokens == {"a": 2}


@pytest.mark.parametrize("ends", ["first", "last"])
def test_one_continuing_request_allows_look_ahead(make_ahead, ends):
    core = make_ahead()
    for name in ("first", "last"):
        core.add(name, 5, max_tokens=1 if name == ends else 9)
    decided(core)
    goes_on = "last" if ends == "first" else "first"
    assert decided(core).num_scheduled_tokens == {goes_on: 1}


@pytest.mark.parametrize("what", ["grammar", "drafts"])
def test_grammar_or_drafts_prevent_look_ahead(make_ahead, what):
    core = make_ahead()
    options = {"structured_outputs": StructuredOutputsParams(regex="a+")} if what == "grammar" else {}
    core.add("a", 5, **options)
    core.add("b", 5)
    first = decided(core)
    if what == "drafts":
        assert core.scheduler.may_look_ahead()
        answer(core, first)
        core.guess({"a": [7, 7]})
        first = decided(core)
        assert first.num_scheduled_tokens == {"a": 3, "b": 1}
    assert not core.scheduler.may_look_ahead()
    core.scheduler.abort_request("a")
    assert core.scheduler.may_look_ahead(), "of whom it is does not matter any more"


def test_drafts_beyond_budget_prevent_look_ahead(make_ahead):
    core = make_ahead(max_num_batched_tokens=2, max_num_seqs=2)
    core.add("a", 1)
    core.add("b", 1)
    answer(core, decided(core))
    core.guess({"b": [7, 7]})
    assert decided(core).num_scheduled_tokens == {"a": 1, "b": 1}
    assert not core.scheduler.may_look_ahead()


def test_drafts_are_dropped_if_next_step_is_already_scheduled(make_ahead):
    core = make_ahead()
    request = core.add("a", 5)
    first, second = decided(core), decided(core)
    answer(core, first)
    core.guess({"a": [7]})
    assert request.spec_token_ids == []
    answer(core, second)
    core.guess({"a": [7]})
    assert request.spec_token_ids == [7]


def test_drafts_are_kept_if_request_is_not_in_flight(make_ahead):
    core = make_ahead(max_num_batched_tokens=8, max_num_seqs=2, batching="prefill_first")
    request = core.add("a", 5)
    answer(core, decided(core))
    core.add("b", 20)
    first, _ = decided(core), decided(core)
    assert first.num_scheduled_tokens.keys() == {"b"}
    core.guess({"a": [7]})
    assert request.spec_token_ids == [7]


def test_drafts_are_dropped_if_one_of_two_steps_computes_request(make_ahead):
    core = make_ahead(max_num_batched_tokens=8, max_num_seqs=2, batching="prefill_first")
    request = core.add("a", 5)
    answer(core, decided(core))
    core.add("b", 6)
    first, second = decided(core), decided(core)
    assert (first.num_scheduled_tokens.keys(), second.num_scheduled_tokens.keys()) == ({"b"}, {"a", "b"})
    core.guess({"a": [7]})
    assert request.spec_token_ids == []


def test_step_scheduled_ahead_preempts_no_request(make_ahead):
    core = make_ahead(
        num_blocks=12, block_size=2, max_num_batched_tokens=8, max_num_seqs=2, enable_prefix_caching=False
    )
    core.add("a", 6, max_tokens=20)
    core.add("b", 2, max_tokens=20)
    ahead = behind = 0
    while core.scheduler.has_work():
        if core.scheduler.in_flight is None:
            behind += 1
            core.scheduler.schedule()
        if core.scheduler.may_look_ahead():
            ahead += 1
            assert not core.scheduler.schedule().preempted_req_ids
        if core.scheduler.in_flight is not None:
            answer(core, core.scheduler.in_flight)
        assert invariants.check(core.scheduler) == []
    assert core.log.of_type(events.RequestPreempted)
    assert ahead > 0
    assert behind > 5


def test_look_ahead_requires_enough_free_blocks(make_ahead):
    """A step of 8 tokens may take 4 blocks, and one more for each running request."""
    core = make_ahead(num_blocks=40, block_size=2, max_num_batched_tokens=8, enable_prefix_caching=False)
    core.add("a", 30, max_tokens=20)
    decided(core)
    pool = core.scheduler.kv_cache_manager.pool
    pool.take(pool.num_free_blocks - 5)
    assert core.scheduler.may_look_ahead()
    pool.take(1)
    assert not core.scheduler.may_look_ahead()


def test_look_ahead_requires_fewer_free_blocks_for_decodes(make_ahead):
    core = make_ahead(num_blocks=40, block_size=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    core.add("a", 2, max_tokens=20)
    core.add("b", 2, max_tokens=20)
    answer(core, decided(core))
    decided(core)
    pool = core.scheduler.kv_cache_manager.pool
    pool.take(pool.num_free_blocks - 4)  # two requests, with two scheduled and two further tokens
    assert core.scheduler.may_look_ahead()
    pool.take(1)
    assert not core.scheduler.may_look_ahead()


def test_look_ahead_requires_enough_free_window_blocks(make_ahead):
    core = make_ahead(num_blocks=40, block_size=2, max_num_batched_tokens=8, window=4, num_window_blocks=20)
    core.add("a", 30, max_tokens=20)
    decided(core)
    windows = core.scheduler.kv_cache_manager.bounded[0]
    assert core.scheduler.may_look_ahead()
    windows._free = windows._free[:5]
    assert core.scheduler.may_look_ahead()
    windows._free = windows._free[:4]
    assert not core.scheduler.may_look_ahead()


def test_request_without_free_block_stalls_until_next_step(make_ahead):
    core = make_ahead(num_blocks=40, block_size=2, max_num_batched_tokens=8, enable_prefix_caching=False)
    core.add("a", 2, max_tokens=20)
    first = decided(core)
    pool = core.scheduler.kv_cache_manager.pool
    blocks = pool.take(pool.num_free_blocks)
    core.add("b", 2)
    scheduled = core.scheduler.schedule()
    assert scheduled.is_empty
    assert [event.request_id for event in core.log.of_type(events.RequestStalled)] == ["a"]
    pool.release(blocks)
    answer(core, first)
    assert decided(core).num_scheduled_tokens == {"a": 1, "b": 2}


def test_requested_preemption_waits_until_no_step_is_in_flight(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first = decided(core)
    core.scheduler.faults.preempt(["a"])
    assert not core.scheduler.may_look_ahead()
    answer(core, first)
    assert decided(core).preempted_req_ids == {"a"}


# --- results ----------------------------------------------------------------------------------------------------------


def test_result_out_of_order_is_dropped(make_ahead):
    core = make_ahead()
    request = core.add("a", 5)
    first, second = decided(core), decided(core)
    assert answer(core, second, {"a": [3]}) == []
    assert core.log.of_type(events.StaleResultDropped)
    assert request.sequence.output_token_ids == []
    answer(core, first)
    [output] = answer(core, second)
    assert output.new_token_ids == [7]


def test_events_of_result_have_number_of_its_step(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first, second = decided(core), decided(core)
    answer(core, first)
    answer(core, second)
    assert [event.step for event in core.log.of_type(events.StepCompleted)] == [first.step, second.step] == [1, 2]
    assert decided(core).step == 3


def test_step_scheduled_ahead_is_timed_from_previous_result(make_ahead):
    clock = {"now": 0.0}
    core = make_ahead(clock=lambda: clock["now"])
    learned = []
    core.scheduler._state.batching.learn = lambda plan, seconds: learned.append((plan.num_tokens["a"], seconds))
    core.add("a", 5)
    first, second = decided(core), decided(core)
    clock["now"] = 3.0
    answer(core, first)
    clock["now"] = 3.5
    third = decided(core)
    clock["now"] = 5.0
    answer(core, second)
    clock["now"] = 6.0
    answer(core, third)
    assert learned == [(5, 3.0), (1, 2.0), (1, 1.0)]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failed_step_discards_next_step_and_restarts_new_requests(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first = decided(core)
    newcomer = core.add("b", 4)
    second = decided(core)
    outputs = core.scheduler.fail_step(first, "broken")
    assert [(each.request_id, each.error) for each in outputs] == [("a", "broken")]
    assert core.scheduler.in_flight is None
    assert (newcomer.status, newcomer.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert [event.step for event in core.log.of_type(events.StepFailed)] == [first.step, second.step]
    [preempted] = core.log.of_type(events.RequestPreempted)
    assert (preempted.request_id, preempted.num_lost_tokens, preempted.swapped) == ("b", 0, False)
    assert invariants.check(core.scheduler) == []
    assert answer(core, second, {"b": [3]}) == []
    again = decided(core)
    assert again.finished_req_ids == {"a", "b"}, "nobody knows what the worker heard"
    assert [data.request_id for data in again.scheduled_new_reqs] == ["b"]
    [output] = answer(core, again)
    assert (output.request_id, output.new_token_ids) == ("b", [7])


def test_failed_step_ends_requests_also_scheduled_in_next_step(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first, _ = decided(core), decided(core)
    [output] = core.scheduler.fail_step(first, "broken")
    assert output.request_id == "a"
    assert core.scheduler.requests == {}
    core.run()
    assert core.scheduler.num_kept_records == 0


def test_later_step_cannot_fail_before_oldest(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first, second = decided(core), decided(core)
    assert core.scheduler.fail_step(second, "broken") == []
    answer(core, first)
    assert [each.request_id for each in core.scheduler.fail_step(second, "broken")] == ["a"]


def test_scheduler_has_work_while_step_is_in_flight(make_ahead):
    core = make_ahead()
    core.add("a", 5)
    first, second = decided(core), decided(core)
    core.scheduler.abort_request("a")
    answer(core, first)
    assert not core.scheduler.may_look_ahead(), "nobody goes on"
    core.scheduler._state.builder._finished_req_ids.clear()
    assert core.scheduler.has_work()
    answer(core, second)
    assert not core.scheduler.has_work()
