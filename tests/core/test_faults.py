"""One test for each fault of docs/reliability.md that concerns the core, named by its id."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.core import invariants
from octavo.core.kv.manager import KVCacheManager
from octavo.data import events
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request, RequestStatus
from octavo.errors import PromptTooLongError, QueueFullError
from octavo.sampling_params import SamplingParams


def check(core):
    assert invariants.check(core.scheduler) == []


def finish_step(core, scheduled, **results):
    """Process a step's result with the given transfers."""
    result = core.compute(scheduled)
    return core.scheduler.update_from_output(scheduled, ModelOutput(result.step, result.sampled_token_ids, **results))


def used_blocks(core):
    pool = core.scheduler.kv_cache_manager.pool
    return pool.num_blocks - pool.num_free_blocks


@pytest.mark.parametrize(
    "state", ["waiting", "prompt under way", "running", "preempted", "swapped", "loading", "deferred"]
)
def test_F1_abort_in_any_state_returns_all_blocks(make_core, state):
    options = {"num_host_blocks": 8, "preemption": "swap"} if state == "swapped" else {}
    if state == "deferred":
        options = {"long_prefill_token_threshold": 4}
    core = make_core(max_num_batched_tokens=8, connector=Store() if state == "loading" else None, **options)
    prompt = list(range(20))
    request = core.add("a", prompt)
    if state == "deferred":
        core.add("b", prompt)
    for _ in range({"waiting": 0, "prompt under way": 1, "loading": 1, "deferred": 1}.get(state, 4)):
        core.step()
    if state in {"preempted", "swapped"}:
        core.scheduler.faults.preempt(["a"])
        core.step()
        assert request.status is RequestStatus.PREEMPTED
        assert ("a" in core.scheduler.kv_cache_manager.saved_blocks()) == (state == "swapped")
    if state == "loading":
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    name = "b" if state == "deferred" else "a"
    if state == "deferred":
        assert core.scheduler.waiting_requests.num_deferred == 1
    [output] = core.scheduler.abort_request(name)
    assert output.finish_reason == "abort"
    check(core)
    core.scheduler.abort_request("a")
    core.run()
    check(core)
    assert used_blocks(core) == 0


def test_F2_blocks_of_aborted_load_remain_held_until_worker_gets_cancel(make_core):
    core = make_core(connector=Store(), num_blocks=10)
    core.add("a", 12)
    scheduled = core.scheduler.schedule()
    [load] = scheduled.kv_transfers
    assert core.scheduler.get_num_transfers() == 1
    finish_step(core, scheduled)
    core.scheduler.abort_request("a")
    assert core.scheduler.get_num_transfers() == 0
    assert used_blocks(core) == len(load.block_ids[0])
    check(core)
    scheduled = core.scheduler.schedule()
    assert scheduled.kv_cancels == [load.transfer_id]
    assert used_blocks(core) == len(load.block_ids[0])
    finish_step(core, scheduled)
    assert used_blocks(core) == 0


def test_F4_late_duplicate_and_unknown_completions_change_nothing(make_core):
    core = make_core(connector=Store())
    core.add("a", 12, max_tokens=3)
    scheduled = core.scheduler.schedule()
    [load] = scheduled.kv_transfers
    told = [EndedTransfer(each, 2) for each in (load.transfer_id, load.transfer_id, 99)]
    finish_step(core, scheduled, kv_transfers=told)
    assert len(core.log.of_type(events.StaleResultDropped)) == 2
    request = core.scheduler.requests["a"]
    assert (request.status, request.num_computed_tokens) == (RequestStatus.RUNNING, 8)
    check(core)
    core.run()
    assert core.finished == {"a": "length"}


def test_F4_step_result_is_processed_once(make_core):
    core = make_core()
    request = core.add("a", 5, max_tokens=5)
    scheduled = core.scheduler.schedule()
    result = core.compute(scheduled)
    assert len(core.scheduler.update_from_output(scheduled, result)) == 1
    assert core.scheduler.update_from_output(scheduled, result) == []
    assert request.sequence.num_output_tokens == 1
    scheduled = core.scheduler.schedule()
    core.scheduler.fail_step(scheduled, "injected")
    assert core.scheduler.update_from_output(scheduled, core.compute(scheduled)) == []
    assert core.scheduler.fail_step(scheduled, "again") == []
    check(core)


def test_F5_failed_load_is_computed_instead(make_core):
    core = make_core(connector=Store())
    core.add("a", 12, max_tokens=3)
    scheduled = core.scheduler.schedule()
    finish_step(core, scheduled, kv_transfers=[EndedTransfer(scheduled.kv_transfers[0].transfer_id, 0)])
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"a": 12}
    assert not scheduled.kv_transfers
    core.run()
    assert core.finished == {"a": "length"}


def test_F7_load_without_completion_expires(make_core):
    core = make_core(connector=Store(), kv_transfer_timeout_s=20.0)
    core.add("a", 12, max_tokens=2)
    core.run()
    assert core.finished == {"a": "length"}
    assert [event.outcome for event in core.log.of_type(events.KVLoadEnded)] == ["expired"]


def test_F8_request_that_can_never_fit_is_refused(make_core):
    core = make_core(num_blocks=3)
    with pytest.raises(PromptTooLongError, match="cannot fit"):
        core.add("a", 12)
    core.add("b", 11, max_tokens=1)
    core.run()
    assert core.finished == {"b": "length"}


def test_F9_every_step_computes_tokens_while_requests_exist(make_core):
    core = make_core(num_blocks=6, max_num_seqs=3, max_num_batched_tokens=5)
    for index in range(10):
        core.add(f"r{index}", 1 + index % 9, max_tokens=8)
    while core.scheduler.requests:
        assert core.step().num_scheduled_tokens
        check(core)


def test_F10_preemptions_of_one_request_are_bounded(make_core):
    core = make_core(num_blocks=6, max_num_seqs=4, max_num_preemptions=2)
    for index in range(8):
        core.add(f"r{index}", 3, max_tokens=16)
    core.run()
    counts: dict[str, int] = {}
    for event in core.log.of_type(events.RequestPreempted):
        counts[event.request_id] = counts.get(event.request_id, 0) + 1
    assert counts
    assert max(counts.values()) <= 2
    assert set(core.finished.values()) == {"length"}


def test_F12_request_that_fills_cache_ends_with_length(make_core):
    core = make_core(num_blocks=4)
    core.add("a", 5, max_tokens=100)
    core.add("b", 5, max_tokens=3)
    core.run()
    assert core.finished == {"a": "length", "b": "length"}
    [end] = [e for e in core.log.of_type(events.RequestFinished) if e.request_id == "a"]
    assert end.num_output_tokens == 4 * 4 + 1 - 5


def test_F13_double_free_is_refused_and_changes_nothing(make_core):
    core = make_core()
    core.add("a", 5)
    core.step()
    pool = core.scheduler.kv_cache_manager.pool
    [free] = [block for block in pool.blocks if block.block_id == 999]
    before = pool.free_list()
    with pytest.raises(AssertionError, match="double free"):
        pool.release([free])
    assert pool.free_list() == before
    check(core)


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, False), (4, True)])
def test_F14_hit_blocks_are_pinned_before_eviction(num_blocks, fits):
    manager = KVCacheManager(num_blocks, 2)
    first = Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=3))
    manager.allocate_slots(first, 5)
    first.num_computed_tokens = 5
    manager.commit(first)
    manager.free(first)
    second = Request("b", [1, 2, 3, 4, 6, 7, 8], SamplingParams(max_tokens=3))
    computed = manager.get_computed_blocks(second)
    assert computed.num_tokens == 4
    ids = manager.allocate_slots(second, 3, computed)
    if not fits:  # only the found blocks could be evicted for it
        assert ids is None
        assert [block.ref_count for block in manager.pool.blocks] == [0, 0, 0]
        return
    assert ids[:2] == [block.block_id for block in computed.blocks]
    assert [block.ref_count for block in computed.blocks] == [1, 1]
    third = Request("c", [9, 9, 9], SamplingParams(max_tokens=3))
    assert manager.allocate_slots(third, 3) is None


def test_F15_step_with_swap_out_admits_no_request(make_core):
    """The victim's blocks are given away in the step that copies them out: copies come first, and no request is
    admitted.
    """
    core = make_core(num_blocks=6, num_host_blocks=6, preemption="swap", max_num_seqs=2, enable_prefix_caching=False)
    core.add("a", 7, max_tokens=12)
    core.add("b", 7, max_tokens=12)
    saved = None
    while core.scheduler.requests:
        scheduled = core.step()
        copies = scheduled.copies
        assert not (copies.swap_out and (copies.swap_in or scheduled.scheduled_new_reqs))
        if copies.swap_out:
            saved = [host for _, _, host in copies.swap_out]
        if copies.swap_in:
            assert [host for _, host, _ in copies.swap_in] == saved
        check(core)
    assert saved
    assert any(event.swapped for event in core.log.of_type(events.RequestPreempted))


def test_F16_block_is_shared_only_after_its_step(make_core):
    core = make_core()
    prompt = list(range(9))
    core.add("a", prompt)
    scheduled = core.scheduler.schedule()
    other = Request("x", prompt, SamplingParams(max_tokens=1))
    assert core.scheduler.kv_cache_manager.get_computed_blocks(other).num_tokens == 0
    finish_step(core, scheduled)
    assert core.scheduler.kv_cache_manager.get_computed_blocks(other).num_tokens == 8


@pytest.mark.sweep(8)
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_F17_block_table_length_matches_computed_tokens(make_core, length):
    core = make_core()
    request = core.add("a", length, max_tokens=6)
    while core.scheduler.requests:
        core.step()
        if request.sequence.block_table:
            assert len(request.sequence.block_table) == -(-request.num_computed_tokens // 4)
        check(core)


@pytest.mark.parametrize("other", [{"adapter": "x"}, {"cache_salt": "x"}, {}])
def test_F18_other_adapter_salt_or_weights_never_hit(make_core, other):
    core = make_core()
    prompt = list(range(9))
    core.add("a", prompt, max_tokens=1)
    core.run()
    if not other:
        core.scheduler.faults.replace_weights()
    core.add("b", prompt, max_tokens=1, **other)
    core.add("c", prompt, max_tokens=1, **other)
    core.run()
    assert [event.num_hit_tokens for event in core.log.of_type(events.PrefixCacheQueried)] == [0, 0, 8]


def test_F19_preemption_and_abort_discard_drafts(make_core):
    core = make_core()
    for name in ("a", "b"):
        core.add(name, 5)
    core.step()
    core.guess({"a": [1, 2], "b": [3]})
    core.scheduler.faults.preempt(["a"])
    scheduled = core.scheduler.schedule()
    assert scheduled.scheduled_spec_decode_tokens == {"b": [3]}
    assert core.scheduler.requests["a"].spec_token_ids == []
    finish_step(core, scheduled)
    core.guess({"b": [4]})
    core.scheduler.abort_request("b")
    assert core.scheduler.schedule().scheduled_spec_decode_tokens == {}


def test_F19_stop_token_among_accepted_drafts_ends_request(make_core):
    core = make_core()
    request = core.add("a", 4, max_tokens=20, stop_token_ids=[99])
    core.step()
    core.guess({"a": [99, 1, 2]})
    scheduled = core.scheduler.schedule()
    [output] = core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [99, 1, 2, 3]}))
    assert (output.new_token_ids, output.finish_reason) == ([99], "stop")
    assert request.sequence.output_token_ids == [7, 99]
    check(core)
    core.run()


def test_F20_failed_step_does_not_end_new_request_with_same_id(make_core):
    core = make_core()
    core.add("a", 4)
    scheduled = core.scheduler.schedule()
    core.scheduler.abort_request("a")
    again = core.add("a", 4, max_tokens=2)
    assert core.scheduler.fail_step(scheduled, "injected") == []
    assert again.status is RequestStatus.WAITING
    core.run()


def test_F18_new_weights_wait_until_no_block_is_held(make_core):
    core = make_core()
    core.add("a", 9, max_tokens=3)
    core.step()
    assert not core.scheduler.faults.replace_weights()
    core.run()
    assert core.scheduler.faults.replace_weights()


def test_F28_tokens_of_deferred_requests_count_as_waiting(make_core):
    core = make_core(max_num_waiting_tokens=30, long_prefill_token_threshold=4)
    prompt = list(range(28))
    core.add("a", prompt)
    core.step()
    core.add("b", prompt)
    core.step()
    assert core.scheduler.waiting_requests.num_deferred == 1
    with pytest.raises(QueueFullError):
        core.add("c", 29)
    core.run()


def test_request_with_failed_load_is_counted_once(make_core):
    core = make_core(connector=Store(), policy="fair")
    core.add("a", 12, max_tokens=3, tenant="t")
    core.add("keep", 12, max_tokens=30)
    scheduled = core.scheduler.schedule()
    finish_step(core, scheduled, kv_transfers=[EndedTransfer(load.transfer_id, 0) for load in scheduled.kv_transfers])
    core.step()
    assert core.scheduler.policy.counters.served("t") <= 12 + 2
    asked = [event.request_id for event in core.log.of_type(events.PrefixCacheQueried)]
    assert sorted(asked) == ["a", "keep"]


def test_F31_finished_requests_are_forgotten(make_core):
    core = make_core(policy="priority", max_num_seqs=1)
    core.add("keep", 3, max_tokens=5000)
    for index in range(1000):
        core.add(f"r{index}", 3, deadline=1e9, priority=9)
        core.scheduler.abort_request(f"r{index}")
        core.step()
    assert len(core.scheduler._lifecycle._deadlines) < 100
    assert len(core.scheduler.waiting._heap) < 100


def test_F20_abort_does_not_change_other_requests(make_core):
    core = make_core()
    prompt = list(range(9))
    core.add("a", prompt, max_tokens=9)
    core.step()
    other = core.add("b", prompt, max_tokens=9)
    core.step()
    table = list(other.sequence.block_table)
    core.scheduler.abort_request("a")
    assert other.sequence.block_table == table
    check(core)
    core.run()
    assert core.finished["b"] == "length"


def test_F34_leaked_block_is_quarantined_and_engine_continues(make_core):
    core = make_core(num_blocks=6)
    core.add("a", 5, max_tokens=2)
    core.run()
    pool = core.scheduler.kv_cache_manager.pool
    pool.blocks[2].ref_count += 1  # a reference without a holder: a leak
    breaches = core.scheduler.check_when_idle()
    assert [breach.invariant for breach in breaches]
    assert pool.quarantined == {2}
    assert core.log.of_type(events.BlocksQuarantined)[0].block_ids == (2,)
    check(core)
    core.add("b", 9, max_tokens=4)
    core.run()
    assert core.finished["b"] == "length"
    with pytest.raises(PromptTooLongError):
        core.add("c", 20)


def test_new_prefix_shared_by_many_requests_is_computed_once(make_core):
    core = make_core(max_num_seqs=32, max_num_batched_tokens=200, num_blocks=2000)
    prefix = list(range(64))
    for index in range(32):
        core.add(f"r{index}", [*prefix, 1000 + index, 2000 + index], max_tokens=2)
    assert list(core.step().num_scheduled_tokens) == ["r0"]
    assert core.scheduler.waiting_requests.num_deferred == 31
    check(core)
    core.run()
    computed = sum(event.num_tokens for event in core.log.of_type(events.StepScheduled))
    assert computed == 64 + 32 * (2 + 1)
    assert set(core.finished.values()) == {"length"}


def test_request_waiting_for_blocks_of_slow_prefill_finishes(make_core):
    core = make_core(max_num_batched_tokens=8, max_num_seqs=4, long_prefill_token_threshold=1)
    prompt = list(range(200))
    core.add("slow", prompt)
    core.add("waits", [*prompt[:100], 7])
    for _ in range(40):
        core.step()
        check(core)
    core.run()
    assert set(core.finished.values()) == {"length"}


def test_second_request_with_equal_prompt_copies_partial_block(make_core):
    core = make_core(max_num_seqs=4)
    prompt = list(range(11))
    core.add("a", prompt, max_tokens=9)
    core.step()
    core.add("b", prompt, max_tokens=9)
    scheduled = core.step()
    a, b = (core.scheduler.requests[name].sequence.block_table for name in "ab")
    assert a[:2] == b[:2]
    assert scheduled.copies.block_copies == [(0, a[2], b[2])]
    assert scheduled.num_scheduled_tokens == {"a": 1, "b": 1}
    check(core)
    core.run()


def test_prefix_cache_event_gives_miss_reason(make_core):
    core = make_core(num_blocks=12, max_num_seqs=1)
    prompt = list(range(8))
    core.add("new", prompt, max_tokens=1)
    core.add("short", [1, 2], max_tokens=1)
    core.add("salted", prompt, max_tokens=1, cache_salt="other")
    core.add("differs", [*prompt[:6], 99, 7, 8], max_tokens=1)
    core.add("large", 46, max_tokens=1)
    core.add("again", prompt, max_tokens=1)
    core.run()
    told = {e.request_id: (e.miss, e.position) for e in core.log.of_type(events.PrefixCacheQueried)}
    assert told == {
        "new": ("never seen", None),
        "short": ("shorter than a block", None),
        "salted": ("other salt", None),
        "differs": ("different token", 6),
        "large": ("never seen", None),
        "again": ("evicted", None),
    }


def test_generated_tokens_are_cached_only_with_cache_decoded_blocks(make_core):
    for wanted, expected in ((True, 12), (False, 4)):
        core = make_core(cache_decoded_blocks=wanted)
        core.answers["a"] = [50, 51, 52, 53, 54, 55, 56, 57, 58]
        core.add("a", [1, 2, 3, 4, 5], max_tokens=9)
        core.run()
        history = Request("x", [1, 2, 3, 4, 5, 50, 51, 52, 53, 54, 55, 56, 57, 58], SamplingParams(max_tokens=1))
        assert core.scheduler.kv_cache_manager.get_computed_blocks(history).num_tokens == expected


def test_evicted_block_loses_its_hash(make_core):
    core = make_core()
    core.add("a", list(range(9)), max_tokens=1)
    core.run()
    pool = core.scheduler.kv_cache_manager.pool
    [first, *_] = pool.cached_blocks()
    core.scheduler.faults.evict(first)
    assert first not in pool.cached_blocks()
    assert first.hash is None
