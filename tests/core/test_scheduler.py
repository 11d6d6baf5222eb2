from __future__ import annotations

import itertools

import pytest

from octavo.data.events import RequestFinished, RequestPreempted, StaleResultDropped, StepCompleted, StepScheduled
from octavo.data.model_output import ModelOutput
from octavo.data.request import RequestStatus
from octavo.errors import ConfigError, RequestError


def idle(core) -> None:
    """Check that nothing remains of any request."""
    manager = core.scheduler.kv_cache_manager
    assert manager.pool.num_free_blocks == manager.pool.num_blocks
    assert manager.num_tracked_requests == 0
    assert not core.scheduler.requests
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    assert all(block.ref_count == 0 for block in manager.pool.blocks)


def test_added_request_waits_and_its_id_is_taken(make_core):
    core = make_core()
    request = core.add("a", 5)
    assert request.status is RequestStatus.WAITING
    assert core.scheduler.get_num_unfinished_requests() == 1
    assert core.scheduler.get_request_counts() == (0, 1)
    with pytest.raises(RequestError, match="in use"):
        core.add("a", 5)


def test_new_request_is_scheduled_with_prompt_and_blocks(make_core):
    core = make_core()
    request = core.add("a", 5)
    scheduled = core.scheduler.schedule()
    assert [data.request_id for data in scheduled.scheduled_new_reqs] == ["a"]
    assert scheduled.scheduled_new_reqs[0].token_ids == request.sequence.prompt_token_ids
    assert scheduled.scheduled_new_reqs[0].block_ids == [[0, 1]]
    assert scheduled.num_scheduled_tokens == {"a": 5}
    assert request.status is RequestStatus.RUNNING


def test_step_computes_all_prompts_then_one_token_each(make_core):
    core = make_core()
    for name, length in (("a", 5), ("b", 3), ("c", 9)):
        core.add(name, length)
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"a": 5, "b": 3, "c": 9}
    assert scheduled.total_num_scheduled_tokens == 17
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert scheduled.scheduled_new_reqs == []
    assert scheduled.scheduled_cached_reqs.req_ids == ["a", "b", "c"]
    assert scheduled.scheduled_cached_reqs.num_computed_tokens == [5, 3, 9]


def test_step_never_exceeds_token_budget(make_core):
    core = make_core(max_num_batched_tokens=10)
    core.add("a", 6)
    core.add("b", 8)
    assert core.step().num_scheduled_tokens == {"a": 6, "b": 4}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 4}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_decodes_never_wait_for_long_prompt(make_core):
    core = make_core(max_num_batched_tokens=8)
    core.add("long", 100)
    core.step()
    core.scheduler.running.append(core.scheduler.running.pop())  # "long" is first
    core.add("short", 2)
    for _ in range(5):
        scheduled = core.step()
        assert scheduled.total_num_scheduled_tokens == 8
        if "short" in core.scheduler.requests and core.scheduler.requests["short"].num_computed_tokens:
            assert scheduled.num_scheduled_tokens["short"] >= 1


def test_max_num_mixed_prefill_tokens_limits_prompts_while_requests_decode(make_core):
    core = make_core(num_blocks=64, max_num_batched_tokens=16, max_num_mixed_prefill_tokens=4)
    core.add("a", 6, max_tokens=3)
    core.add("long", 100)
    assert core.step().num_scheduled_tokens == {"a": 6, "long": 10}  # no request decodes yet
    core.add("b", 3)
    assert core.step().num_scheduled_tokens == {"a": 1, "long": 4}
    assert core.step().num_scheduled_tokens == {"a": 1, "long": 4}
    assert core.step().num_scheduled_tokens == {"long": 16}
    core.run()
    idle(core)


def test_prompt_gets_budget_that_decodes_do_not_use(make_core):
    core = make_core(num_blocks=64, max_num_batched_tokens=6, max_num_seqs=6, max_num_mixed_prefill_tokens=4)
    for name in "abcd":
        core.add(name, 1, max_tokens=20)
    core.step()
    core.add("long", 9)
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 1, "long": 2}


def test_long_prompts_do_not_starve_later_decodes(make_core):
    core = make_core(
        num_blocks=600, max_num_seqs=8, max_num_batched_tokens=64, long_prefill_token_threshold=8,
        max_num_mixed_prefill_tokens=2,
    )  # fmt: skip
    for index in range(6):
        core.add(f"long{index}", 300)
    core.step()
    core.add("a", 2, max_tokens=50)
    core.add("b", 2, max_tokens=50)
    core.step()
    for _ in range(40):
        scheduled = core.step().num_scheduled_tokens
        assert {"a", "b"} <= set(scheduled)
        assert all(f"long{index}" in scheduled for index in range(6))


class Timed:
    """A core with steps of `ms` milliseconds for each token. One request decodes while a prompt is computed."""

    def __init__(self, make_core, ms, **options):
        self.ms, self.now = ms, 0.0
        self.core = make_core(
            num_blocks=5000, max_num_batched_tokens=160, mixed_step_ms=100.0, clock=lambda: self.now, **options
        )
        self.core.add("answer", 1, max_tokens=5000)
        self.step()
        self.core.add("prompt", 9000)

    def step(self):
        """Do one step; return the number of its prompt tokens."""
        scheduled = self.core.scheduler.schedule()
        self.now += self.ms / 1000 * scheduled.total_num_scheduled_tokens
        self.core.scheduler.update_from_output(scheduled, self.core.compute(scheduled))
        return scheduled.num_scheduled_tokens.get("prompt", 0)

    def steps(self, count):
        return [self.step() for _ in range(count)]


def test_prefill_limit_follows_measured_step_time(make_core):
    timed = Timed(make_core, ms=2.0)
    counts = timed.steps(20)
    assert counts[0] == 20  # an eighth of a step, until a time is measured
    assert counts == sorted(counts)
    assert all(after <= 1.25 * before + 1 for before, after in itertools.pairwise(counts))
    assert 47 <= counts[-1] <= 49  # and the decoded token: 2 ms each
    timed.ms = 4.0  # another program slows the machine down
    assert 23 <= timed.steps(20)[-1] <= 24
    timed.ms = 50.0
    assert timed.steps(5)[-1] == 20  # slow, but prompts keep a minimum
    timed.ms = 0.0
    assert timed.steps(20)[-1] == 159
    assert timed.core.scheduler.batching.prefill_limit == 160


def test_one_slow_step_at_most_halves_prefill_limit(make_core):
    timed = Timed(make_core, ms=1.0)
    before = timed.steps(20)[-1]
    timed.ms = 1000.0
    timed.step()
    timed.ms = 1.0
    assert timed.step() == before // 2
    assert timed.steps(10)[-1] >= before - 1


def test_unused_prefill_limit_does_not_change(make_core):
    timed = Timed(make_core, ms=1.0, long_prefill_token_threshold=10)
    assert timed.steps(20) == [10] * 20
    assert timed.core.scheduler.batching.prefill_limit == 20
    timed.core.scheduler.abort_request("prompt")
    timed.steps(20)
    assert timed.core.scheduler.batching.prefill_limit == 20


def test_prefill_limit_grows_if_next_token_does_not_fit(make_core):
    timed = Timed(make_core, ms=50.0, attention_cost_tokens=1.0)
    request = timed.core.scheduler.requests["prompt"]
    while request.num_computed_tokens < 6100:
        timed.step()
    assert timed.core.scheduler.batching.prefill_limit == 20
    timed.ms = 0.0
    assert timed.step() == 2  # at 7.1 each: 14 of 20
    assert timed.core.scheduler.batching.prefill_limit == 25


def test_slow_decode_only_steps_do_not_change_prefill_limit(make_core):
    timed = Timed(make_core, ms=2.0)
    before = timed.steps(20)[-1]
    timed.core.scheduler.abort_request("prompt")
    timed.ms = 1000.0
    timed.steps(20)
    timed.core.add("prompt", 9000)
    timed.ms = 2.0
    assert timed.step() == before


def test_slow_step_halves_prefill_limit_even_if_not_filled(make_core):
    timed = Timed(make_core, ms=1.0)
    before = timed.steps(20)[-1]
    timed.core.scheduler.abort_request("prompt")
    timed.core.add("short", 5, max_tokens=1)
    timed.ms = 1000.0
    timed.step()
    assert timed.core.scheduler.batching.prefill_limit == before // 2


def test_requests_waiting_for_budget_raise_prefill_limit(make_core):
    timed = Timed(make_core, ms=1.0)
    timed.core.scheduler.abort_request("prompt")
    for index in range(200):
        timed.core.add(f"short{index}", 20, max_tokens=1)
    timed.steps(30)
    assert timed.core.scheduler.batching.prefill_limit > 80


def test_fast_steps_never_exceed_max_num_mixed_prefill_tokens(make_core):
    assert max(Timed(make_core, ms=0.1, max_num_mixed_prefill_tokens=50).steps(20)) == 50
    assert Timed(make_core, ms=0.1, max_num_mixed_prefill_tokens=7).steps(20) == [7] * 20


def test_failed_step_does_not_change_prefill_limit(make_core):
    timed = Timed(make_core, ms=1.0)
    timed.steps(5)
    before = timed.core.scheduler.batching.prefill_limit
    scheduled = timed.core.scheduler.schedule()
    timed.now += 1000
    timed.core.scheduler.fail_step(scheduled, "broken")
    assert timed.core.scheduler.batching.prefill_limit == before


def test_prompt_token_cost_grows_with_position(make_core):
    core = make_core(num_blocks=64, max_num_batched_tokens=16, attention_cost_tokens=1000 / 16)
    core.add("long", 60)
    counts = [core.step().num_scheduled_tokens["long"] for _ in range(7)]
    # The first tokens of the chunks are at 0, 16, 24, 30, 35, 40, 44 and cost 1, 2, 2.5, 2.9, 3.2, 3.5, 3.75 each.
    assert counts == [16, 8, 6, 5, 5, 4, 4]
    core.add("next", 8)
    assert core.step().num_scheduled_tokens == {"long": 4}  # 4 each, from 48
    assert core.step().num_scheduled_tokens == {"long": 3, "next": 3}  # 4.25 each: 12.75 of 16
    core.run()
    idle(core)


def test_prompt_advances_even_if_next_token_exceeds_budget(make_core):
    core = make_core(num_blocks=64, max_num_batched_tokens=8, attention_cost_tokens=1000.0)
    core.add("a", 1, max_tokens=30)
    core.add("long", 40)
    counts = [core.step().num_scheduled_tokens for _ in range(20)]
    assert [count["long"] for count in counts[:4]] == [7, 1, 1, 1]
    assert all(count["a"] == 1 for count in counts)


def test_cached_prefix_counts_in_prompt_token_cost(make_core):
    core = make_core(num_blocks=64, max_num_batched_tokens=16, attention_cost_tokens=1000 / 16)
    core.add("first", list(range(33)))
    core.run()
    core.add("second", [*range(32), *range(100, 132)])
    assert core.step().num_scheduled_tokens == {"second": 5}  # 16 / (1 + 32 / 16)


def test_short_prompt_shares_steps_with_earlier_long_prompt(make_core):
    core = make_core(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    core.add("long", 100)
    core.add("short", 9)
    assert core.step().num_scheduled_tokens == {"long": 5, "short": 3}
    assert core.step().num_scheduled_tokens == {"long": 5, "short": 3}
    assert core.step().num_scheduled_tokens == {"long": 5, "short": 3}
    assert core.step().num_scheduled_tokens == {"long": 5, "short": 1}


def test_small_request_does_not_overtake_blocked_head_of_line(make_core):
    core = make_core(num_blocks=4, max_num_batched_tokens=100)
    core.add("a", 8)
    core.step()
    core.add("big", 12)
    core.add("small", 2)
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"a": 1}
    assert core.scheduler.get_request_counts() == (1, 2)


def test_unchunked_prompt_is_cut_only_if_larger_than_budget(make_core):
    core = make_core(max_num_batched_tokens=10, enable_chunked_prefill=False)
    core.add("a", 6)
    core.add("b", 8)
    core.add("huge", 25)
    assert core.step().num_scheduled_tokens == {"a": 6}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 8, "huge": 1}
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 1, "huge": 8}
    for name in (
        "long_prefill_token_threshold", "mixed_step_ms", "max_num_mixed_prefill_tokens", "attention_cost_tokens",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            make_core(enable_chunked_prefill=False, **{name: 4})


def test_max_num_seqs_limits_running_requests(make_core):
    core = make_core(max_num_seqs=2)
    for name in "abc":
        core.add(name, 3, max_tokens=2)
    assert list(core.step().num_scheduled_tokens) == ["a", "b"]
    core.run()
    assert core.finished == {"a": "length", "b": "length", "c": "length"}
    idle(core)


@pytest.mark.parametrize(
    ("options", "answers", "reason", "num_output", "stop_reason"),
    [
        ({"max_tokens": 3}, [], "length", 3, None),
        ({"stop_token_ids": [9]}, [5, 9, 5], "stop", 2, None),
        ({"max_tokens": 2, "stop_token_ids": [9]}, [5, 9], "stop", 2, None),
    ],
)
def test_stop_token_or_max_tokens_ends_request(make_core, options, answers, reason, num_output, stop_reason):
    core = make_core()
    request = core.add("a", 4, **options)
    core.answers["a"] = answers
    core.run()
    assert core.finished == {"a": reason}
    assert request.sequence.num_output_tokens == num_output
    assert request.stop_reason == stop_reason
    idle(core)


def test_step_with_several_tokens_stops_at_first_stop_token(make_core):
    core = make_core()
    request = core.add("a", 4, stop_token_ids=[9], max_tokens=50)
    core.step()
    core.guess({"a": [1, 2, 9, 4]})
    scheduled = core.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"a": 5}
    assert scheduled.scheduled_spec_decode_tokens == {"a": [1, 2, 9, 4]}
    (output,) = core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [1, 2, 9, 4, 5]}))
    assert output.new_token_ids == [1, 2, 9]
    assert output.finish_reason == "stop"
    assert request.sequence.output_token_ids == [7, 1, 2, 9]
    core.run()
    idle(core)


def test_rejected_drafts_are_rolled_back(make_core):
    core = make_core()
    request = core.add("a", 4, max_tokens=50)
    core.step()
    core.guess({"a": [1, 2, 3]})
    scheduled = core.scheduler.schedule()
    core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [1, 8]}))
    assert request.num_computed_tokens == 4 + 2
    assert request.sequence.output_token_ids == [7, 1, 8]
    assert request.num_computed_tokens == len(request.sequence.token_ids) - 1
    assert core.step().num_scheduled_tokens == {"a": 1}


def test_max_model_len_ends_request(make_core):
    core = make_core(max_model_len=10)
    request = core.add("a", 6, max_tokens=100)
    core.run()
    assert core.finished == {"a": "length"}
    assert len(request.sequence.token_ids) == 10


@pytest.mark.parametrize(
    ("prompt", "limits", "word"),
    [
        ([], {}, "empty"),
        (10, {"max_model_len": 10}, "max_model_len"),
        (16, {"num_blocks": 4, "max_model_len": 100}, "cannot fit"),
    ],
)
def test_request_that_can_never_fit_is_refused_on_arrival(make_core, prompt, limits, word):
    core = make_core(**limits)
    with pytest.raises(RequestError, match=word) as caught:
        core.add("a", prompt)
    assert caught.value.parameter == "prompt"
    assert not core.scheduler.has_work()
    core.add("b", 4)
    core.run()
    assert core.finished == {"b": "length"}


def test_full_queue_refuses_request_until_it_drains(make_core):
    core = make_core(max_num_waiting=1)
    core.add("a", 4)
    with pytest.raises(RequestError, match="queue is full"):
        core.add("b", 4)
    core.step()
    core.add("b", 4)


def test_lone_request_fills_cache_and_ends_with_length(make_core):
    core = make_core(num_blocks=4, block_size=4)
    request = core.add("a", 10, max_tokens=100)
    core.run()
    assert core.finished == {"a": "length"}
    assert len(request.sequence.token_ids) == 4 * 4 + 1
    assert not core.log.of_type(RequestPreempted)
    idle(core)


def test_latest_request_is_preempted_and_keeps_its_tokens(make_core):
    core = make_core(num_blocks=5, block_size=4, enable_prefix_caching=False)
    core.add("old", 8, max_tokens=10)
    young = core.add("young", 8, max_tokens=10)
    first = core.step()
    assert first.num_scheduled_tokens == {"old": 8, "young": 8}
    second = core.step()  # old takes the fifth block, young is preempted
    assert second.num_scheduled_tokens == {"old": 1}
    assert second.preempted_req_ids == {"young"}
    assert young.status is RequestStatus.PREEMPTED
    assert young.num_computed_tokens == 0
    assert young.sequence.output_token_ids == [7]
    assert young.sequence.block_table == []
    assert core.scheduler.waiting.peek_request() is young
    core.run()
    assert core.finished == {"old": "length", "young": "length"}
    assert young.sequence.num_output_tokens == 10
    idle(core)


def test_step_that_preempts_admits_no_new_request(make_core):
    core = make_core(num_blocks=6, block_size=4, enable_prefix_caching=False)
    core.add("a", 8, max_tokens=30)
    core.add("b", 11, max_tokens=30)
    core.step()
    core.add("tiny", 1)
    for _ in range(40):
        scheduled = core.step()
        if scheduled.preempted_req_ids:
            assert scheduled.scheduled_new_reqs == []
            break
    else:
        raise AssertionError("nothing was preempted")


def test_resumed_request_is_sent_completely_and_hits_its_cached_blocks(make_core):
    core = make_core(num_blocks=5, block_size=4)
    core.add("old", 8, max_tokens=4)
    young = core.add("young", 8, max_tokens=9)
    core.step()
    core.step()
    assert young.status is RequestStatus.PREEMPTED
    for _ in range(10):
        scheduled = core.step()
        if scheduled.scheduled_new_reqs:
            break
    (data,) = scheduled.scheduled_new_reqs
    assert data.token_ids == young.sequence.token_ids[: len(data.token_ids)]
    assert data.num_prompt_tokens == 8
    assert data.num_computed_tokens > 0
    core.run()
    idle(core)


def test_priority_policy_preempts_least_important_request(make_core):
    core = make_core(num_blocks=5, block_size=4, policy="priority", enable_prefix_caching=False)
    lazy = core.add("lazy", 8, priority=5, max_tokens=10)
    core.add("urgent", 8, priority=1, max_tokens=10)
    core.step()
    scheduled = core.step()
    assert scheduled.preempted_req_ids == {"lazy"}
    assert scheduled.num_scheduled_tokens == {"urgent": 1}
    assert lazy.status is RequestStatus.PREEMPTED
    core.run()
    assert core.finished == {"urgent": "length", "lazy": "length"}
    idle(core)


def test_preempted_request_is_removed_from_step_that_scheduled_it(make_core):
    core = make_core(num_blocks=7, block_size=4, policy="priority", enable_prefix_caching=False)
    core.add("lazy", 7, priority=5, max_tokens=20)
    core.add("urgent", 14, priority=1, max_tokens=8)
    for _ in range(3):  # in the third step lazy takes the last free block
        assert len(core.step().num_scheduled_tokens) == 2
    scheduled = core.step()  # lazy, earlier in the order, got its token before urgent needs a block
    assert scheduled.preempted_req_ids == {"lazy"}
    assert scheduled.num_scheduled_tokens == {"urgent": 1}
    assert scheduled.total_num_scheduled_tokens == 1
    core.run()
    idle(core)


@pytest.mark.parametrize("moment", ["waiting", "running", "between"])
def test_abort_ends_waiting_running_or_in_flight_request(make_core, moment):
    core = make_core()
    core.add("bystander", 6, max_tokens=5)
    core.add("a", 6, max_tokens=50)
    if moment != "waiting":
        core.step()
    if moment == "between":
        scheduled = core.scheduler.schedule()
        result = core.compute(scheduled)
        core.scheduler.abort_request("a")
        assert core.scheduler.update_from_output(scheduled, result)[0].request_id == "bystander"
    else:
        (output,) = core.scheduler.abort_request("a")
        assert output.finish_reason == "abort"
    assert core.scheduler.abort_request("a") == []
    core.run()
    assert core.finished == {"bystander": "length"}
    assert [event.request_id for event in core.log.of_type(RequestFinished)] == ["a", "bystander"]
    idle(core)


def test_finished_ids_are_delivered_even_if_nothing_is_scheduled(make_core):
    core = make_core()
    core.add("a", 4, max_tokens=1)
    core.step()
    assert core.scheduler.has_work()
    scheduled = core.step()
    assert scheduled.total_num_scheduled_tokens == 0
    assert scheduled.finished_req_ids == {"a"}
    assert not scheduled.is_empty
    assert core.scheduler.schedule().is_empty
    assert not core.scheduler.has_work()


def test_late_and_duplicate_results_change_nothing(make_core):
    core = make_core()
    request = core.add("a", 4, max_tokens=5)
    first = core.scheduler.schedule()
    result = core.compute(first)
    core.scheduler.update_from_output(first, result)
    assert core.scheduler.update_from_output(first, ModelOutput(first.step + 7, {"a": [1]})) == []
    core.scheduler.schedule()
    assert core.scheduler.update_from_output(first, result) == []
    assert request.sequence.output_token_ids == [7]
    assert len(core.log.of_type(StaleResultDropped)) == 2


def test_failed_step_ends_only_its_requests(make_core):
    core = make_core(max_num_seqs=1)
    core.add("a", 4)
    core.add("b", 4, max_tokens=2)
    scheduled = core.scheduler.schedule()
    (output,) = core.scheduler.fail_step(scheduled, "boom")
    assert (output.request_id, output.finish_reason, output.error) == ("a", "error", "boom")
    core.run()
    assert core.finished == {"b": "length"}
    idle(core)


def test_request_error_fails_only_that_request(make_core):
    core = make_core()
    core.add("bad", 4)
    core.add("good", 4, max_tokens=2)
    scheduled = core.scheduler.schedule()
    outputs = core.scheduler.update_from_output(
        scheduled, ModelOutput(scheduled.step, {"good": [7]}, errors={"bad": "NaN"})
    )
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("bad", "error"), ("good", None)]
    core.run()
    assert core.finished == {"good": "length"}
    idle(core)


def test_events_count_steps_tokens_and_ends(make_core):
    core = make_core()
    core.add("a", 8, max_tokens=3)
    core.run()
    assert [event.num_tokens for event in core.log.of_type(StepScheduled)] == [8, 1, 1]
    assert [event.num_new_tokens for event in core.log.of_type(StepCompleted)] == [{"a": 1}] * 3
    assert len(core.log.of_type(RequestFinished)) == 1
    assert core.scheduler.get_request_counts() == (0, 0)
    assert core.scheduler.kv_cache_manager.pool.usage == 0.0


def test_equal_arrivals_give_equal_event_traces(make_core):
    def trace() -> list[object]:
        core = make_core(num_blocks=12, block_size=4, max_num_batched_tokens=16)
        for index in range(6):
            core.add(f"r{index}", 3 + 2 * index, max_tokens=8)
        core.run()
        return core.log.events

    assert trace() == trace()


def test_f10_admission_reserves_one_free_block_per_running_request(make_core):
    core = make_core(num_blocks=6, block_size=4, enable_prefix_caching=False)
    core.add("a", 8, max_tokens=5)
    core.step()
    core.add("b", 12, max_tokens=2)
    assert core.step().num_scheduled_tokens == {"a": 1}  # 3 of 3 free blocks suffice for b, but a would evict it
    core.run()
    assert not core.log.of_type(RequestPreempted)
    assert core.finished == {"a": "length", "b": "length"}


def test_f9_computed_request_without_sampled_token_fails(make_core):
    core = make_core()
    core.add("a", 4)
    scheduled = core.scheduler.schedule()
    (output,) = core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {}))
    assert output.finish_reason == "error"
    core.run()
    idle(core)


def test_failed_step_reports_ended_requests_to_worker_again(make_core):
    core = make_core(num_blocks=5, block_size=4, enable_prefix_caching=False)
    core.add("old", 8, max_tokens=10)
    core.add("young", 8, max_tokens=10)
    core.step()
    scheduled = core.scheduler.schedule()
    assert scheduled.preempted_req_ids == {"young"}
    core.scheduler.fail_step(scheduled, "boom")
    assert core.scheduler.schedule().finished_req_ids == {"old", "young"}
