from __future__ import annotations

from dataclasses import replace

import pytest
from stores import Store

from octavo.core import invariants
from octavo.data import events
from octavo.data.expert_stats import ExpertLoad
from octavo.data.kv_tiers import TierMove
from octavo.data.model_output import ModelOutput, TokenLogprobs
from octavo.data.request import RequestStatus


def take(core, scheduled, sampled, **results):
    """Process a step's result with these sampled tokens."""
    return core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, sampled, **results))


def drafted(make_core, drafts, **options):
    """Return a core, request "a" (4 prompt tokens, then 7) with drafts in a step with request "b", and the step."""
    core = make_core()
    request = core.add("a", 4, **{"max_tokens": 50, **options})
    core.add("b", 4, max_tokens=50)
    core.step()
    core.guess({"a": drafts})
    return core, request, core.scheduler.schedule()


@pytest.mark.parametrize("sampled", [[], [1, 2, 3, 4, 5]], ids=["none", "one more than there are rows"])
def test_wrong_number_of_sampled_tokens_fails_only_its_request(make_core, sampled):
    core, request, scheduled = drafted(make_core, [1, 2, 3])
    assert scheduled.num_scheduled_tokens == {"a": 4, "b": 1}
    failed, other = take(core, scheduled, {"a": sampled, "b": [7]})
    assert (failed.request_id, failed.finish_reason) == ("a", "error")
    assert f"sampled {len(sampled)} tokens" in failed.error
    assert "1 to 4" in failed.error
    assert (other.request_id, other.finish_reason) == ("b", None)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert request.sequence.output_token_ids == [7]  # the result is discarded
    assert core.log.of_type(events.DraftsVerified) == []
    assert invariants.check(core.scheduler) == []
    core.run()
    assert core.finished == {"b": "length"}


def test_drafted_request_missing_in_result_fails(make_core):
    core, _, scheduled = drafted(make_core, [1])
    assert [(output.request_id, output.finish_reason) for output in take(core, scheduled, {"b": [7]})] == [
        ("a", "error"),
        ("b", None),
    ]


@pytest.mark.parametrize("num_sampled", [1, 2, 3, 4])
def test_accepted_drafts_are_sampled_tokens_minus_one(make_core, num_sampled):
    core, request, scheduled = drafted(make_core, [1, 2, 3])
    take(core, scheduled, {"a": [1, 2, 3, 4][:num_sampled], "b": [7]})
    assert request.num_computed_tokens == 4 + num_sampled == len(request.sequence.token_ids) - 1
    assert request.num_computed_in_all == 4 + 4
    assert request.spec_token_ids == []
    [verified] = core.log.of_type(events.DraftsVerified)
    assert (verified.num_drafted, verified.num_accepted) == (3, num_sampled - 1)
    assert invariants.check(core.scheduler) == []


def test_postponed_token_is_scheduled_again(make_core):
    core, request, scheduled = drafted(make_core, [1, 2, 3])
    [other] = take(core, scheduled, {"b": [7]}, postponed={"a"})
    assert other.request_id == "b"
    assert (request.num_computed_tokens, request.num_computed_in_all) == (4, 4 + 4)
    assert (request.sequence.output_token_ids, request.spec_token_ids) == ([7], [])
    assert [event.request_id for event in core.log.of_type(events.TokenPostponed)] == ["a"]
    assert core.log.of_type(events.DraftsVerified) == []
    assert invariants.check(core.scheduler) == []
    again = core.scheduler.schedule()
    assert again.num_scheduled_tokens == {"a": 1, "b": 1}
    [output, _] = take(core, again, {"a": [8], "b": [7]})
    assert (output.new_token_ids, request.num_computed_tokens) == ([8], 5)


def test_prompt_logprobs_are_returned_while_token_is_postponed(make_core):
    core = make_core()
    request = core.add("a", 8, prompt_logprobs=0)
    entries = [TokenLogprobs([index], [-1.0], 1) for index in range(7)]
    [output] = take(core, core.scheduler.schedule(), {}, prompt_logprobs={"a": entries}, postponed={"a"})
    assert (output.new_prompt_logprobs, output.new_token_ids, output.num_accepted_tokens) == (entries, [], 0)
    assert (request.num_computed_tokens, len(request.sequence.block_table)) == (7, 2)
    [output] = take(core, core.scheduler.schedule(), {"a": [7]})
    assert (output.new_prompt_logprobs, output.new_token_ids) == ([], [7])


@pytest.mark.parametrize(
    ("length", "due"), [(4, "its token is postponed"), (20, "some of its known tokens are not computed")]
)
def test_sampled_token_that_is_also_postponed_is_error(make_core, length, due):
    core = make_core(max_num_batched_tokens=8)
    core.add("a", length)
    [output] = take(core, core.scheduler.schedule(), {"a": [7]}, postponed={"a"})
    assert output.error == f"the worker sampled 1 tokens; {due}"
    assert output.finish_reason == "error"


def test_partially_computed_prompt_has_no_token_to_postpone(make_core):
    core = make_core(max_num_batched_tokens=8)
    request = core.add("long", 20)
    assert take(core, core.scheduler.schedule(), {}, postponed={"long"}) == []
    assert request.num_computed_tokens == 8
    assert core.log.of_type(events.TokenPostponed) == []


def test_token_of_partially_computed_prompt_is_error(make_core):
    core = make_core(max_num_batched_tokens=8)
    core.add("long", 20)
    scheduled = core.scheduler.schedule()
    [output] = take(core, scheduled, {"long": [7]})
    assert output.finish_reason == "error"
    assert "sampled 1 tokens; some of its known tokens are not computed" in output.error
    assert invariants.check(core.scheduler) == []


def test_more_than_one_token_without_drafts_is_error(make_core):
    core = make_core()
    core.add("a", 4)
    [output] = take(core, core.scheduler.schedule(), {"a": [7, 8]})
    assert (output.finish_reason, output.new_token_ids) == ("error", [])


def test_logprobs_end_with_stop_token(make_core):
    core, _, scheduled = drafted(make_core, [1, 2], stop_token_ids=[2])
    entries = [TokenLogprobs([token], [-1.0], 1) for token in (1, 2, 3)]
    output, _ = take(core, scheduled, {"a": [1, 2, 3], "b": [7]}, logprobs={"a": entries})
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([1, 2], "stop", None)
    assert output.new_logprobs == entries[:2]


def test_prompt_logprobs_are_not_returned_again_after_preemption(make_core):
    core = make_core(max_num_batched_tokens=4, max_num_seqs=4)
    core.add("a", 7, prompt_logprobs=0)
    entries = [TokenLogprobs([index], [-1.0], 1) for index in range(6)]
    [output] = take(core, core.scheduler.schedule(), {}, prompt_logprobs={"a": entries[:3]})
    assert output.new_prompt_logprobs == entries[:3]
    core.scheduler.faults.preempt(["a"])
    assert core.step().preempted_req_ids == {"a"}
    scheduled = core.scheduler.schedule()
    assert take(core, scheduled, {}, prompt_logprobs={"a": entries[:3]}) == []
    [output] = take(core, core.scheduler.schedule(), {"a": [7]}, prompt_logprobs={"a": entries[3:]})
    assert output.new_prompt_logprobs == entries[3:]


@pytest.mark.parametrize(("max_tokens", "kept"), [(50, [1, 2, 3]), (4, [1, 2]), (2, []), (3, [1])])
def test_drafts_are_cut_to_max_tokens(make_core, max_tokens, kept):
    core = make_core()
    request = core.add("a", 4, max_tokens=max_tokens)
    core.step()
    core.guess({"a": [1, 2, 3], "unknown": [1]})
    assert request.spec_token_ids == kept


def test_drafts_of_requests_that_do_not_decode_are_dropped(make_core):
    core = make_core(max_num_batched_tokens=8, max_num_seqs=1)
    prompt, waiting = core.add("prompt", 20), core.add("waiting", 4)
    core.step()
    core.guess({"prompt": [1], "waiting": [1]})
    assert prompt.spec_token_ids == waiting.spec_token_ids == []


def test_step_charges_each_tenant_by_its_weight(make_core):
    core = make_core(policy="fair")
    core.add("a", 4, tenant="x", tenant_weight=2.0, max_tokens=50)
    core.add("b", 4, tenant="y", max_tokens=50)
    core.step()
    before = [core.scheduler.policy.counters.served(tenant) for tenant in "xy"]
    core.step()
    after = [core.scheduler.policy.counters.served(tenant) for tenant in "xy"]
    served_x, served_y = (now - then for now, then in zip(after, before, strict=True))
    assert served_y == 2 * served_x > 0


@pytest.mark.parametrize(
    ("prompt", "num_cached_blocks"),
    [(4, 1), (5, 1)],
    ids=["drafts behind the end would fill a block", "the last token would fill a block"],
)
def test_drafts_after_stop_token_are_not_cached(make_core, prompt, num_cached_blocks):
    core = make_core()
    core.add("a", prompt, max_tokens=50, stop_token_ids=[2])
    core.add("keeps going", 1, max_tokens=50)
    core.step()
    core.guess({"a": [1, 2, 3]})
    scheduled = core.scheduler.schedule()
    output, _ = take(core, scheduled, {"a": [1, 2, 3, 4], "keeps going": [7]})
    assert (output.new_token_ids, output.finish_reason) == ([1, 2], "stop")
    assert core.scheduler.kv_cache_manager.pool.num_cached_blocks == num_cached_blocks
    assert invariants.check(core.scheduler) == []


def test_block_is_cached_after_step_that_fills_it(make_core):
    core = make_core()
    request = core.add("a", 5, max_tokens=50)
    while request.num_computed_tokens < 8:
        assert core.scheduler.kv_cache_manager.pool.num_cached_blocks == (request.num_computed_tokens > 0)
        core.step()
    assert core.scheduler.kv_cache_manager.pool.num_cached_blocks == 2


def test_pooled_vector_is_returned_with_its_request(make_core):
    core = make_core()
    core.add("a", 4, max_tokens=1)
    core.add("b", 4, max_tokens=1)
    pooled = [0.5, 0.25]
    a, b = take(core, core.scheduler.schedule(), {"a": [7], "b": [7]}, pooled={"a": pooled})
    assert (a.pooled, b.pooled) == (pooled, None)


def test_host_memory_copies_emit_event(make_core):
    core = make_core()
    core.add("a", 4, max_tokens=2)
    saved, loaded = TierMove("host", 2, 200, 0.5), TierMove("host", 1, 100, 0.25)
    take(core, core.scheduler.schedule(), {"a": [7]}, host_moves=[saved, loaded])
    take(core, core.scheduler.schedule(), {"a": [7]})
    [copied] = core.log.of_type(events.HostBlocksCopied)
    assert (copied.saved, copied.loaded) == (saved, loaded)


def test_compiled_kernels_emit_event(make_core):
    core = make_core()
    core.add("a", 4, max_tokens=2)
    take(core, core.scheduler.schedule(), {"a": [7]}, num_compilations=2)
    take(core, core.scheduler.schedule(), {"a": [7]})
    assert [event.num_kernels for event in core.log.of_type(events.KernelsCompiled)] == [2]


def test_work_of_experts_emits_event(make_core):
    core, load = make_core(), ExpertLoad(12, 4, 4000, 1.5)
    core.add("a", 4, max_tokens=2)
    take(core, core.scheduler.schedule(), {"a": [7]}, experts=load)
    take(core, core.scheduler.schedule(), {"a": [7]})
    assert [(event.step, event.load) for event in core.log.of_type(events.ExpertsComputed)] == [(1, load)]


def test_failed_step_cancels_loads_that_it_ordered(make_core):
    core = make_core(connector=Store())
    request = core.add("a", 12)
    scheduled = core.scheduler.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert core.scheduler.fail_step(scheduled, "broken") == []
    assert request.status is RequestStatus.WAITING
    assert [event.outcome for event in core.log.of_type(events.KVLoadEnded)] == ["failed"]
    assert invariants.check(core.scheduler) == []
    scheduled = core.scheduler.schedule()
    assert scheduled.kv_cancels == [0]
    assert scheduled.num_scheduled_tokens == {"a": 12}  # computed instead of loaded


def test_failed_step_does_not_end_aborted_request_again(make_core):
    core = make_core()
    core.add("a", 4)
    core.add("b", 4)
    scheduled = core.scheduler.schedule()
    core.scheduler.abort_request("a")
    assert [output.request_id for output in core.scheduler.fail_step(scheduled, "broken")] == ["b"]


def test_waiting_request_gets_no_drafts(make_core):
    core = make_core()
    request = core.add("a", 1)
    core.guess({"a": [1]})
    assert request.spec_token_ids == []


def test_result_before_first_step_is_discarded(make_core):
    other = make_core()
    other.add("a", 4)
    scheduled = other.scheduler.schedule()
    core = make_core()
    assert take(core, scheduled, {"a": [7]}) == []
    assert core.scheduler.fail_step(scheduled, "broken") == []


def test_drafts_of_result_are_scheduled_in_next_step(make_core):
    core = make_core()
    core.add("a", 3)
    scheduled = core.scheduler.schedule()
    core.scheduler.update_from_output(scheduled, replace(core.compute(scheduled), draft_token_ids={"a": [1, 2]}))
    assert core.scheduler.schedule().scheduled_spec_decode_tokens == {"a": [1, 2]}
