"""The core with sliding windows: window blocks that a request holds, finds, copies, saves and loads."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import invariants
from octavo.core.kv.manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.kv_groups import NO_BLOCK
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.metrics import EngineMetrics


@pytest.fixture
def make_windowed(make_core):
    """Blocks of 4 tokens; a row sees 6 tokens in at most 3 blocks, and a step of 8 tokens needs 2 more."""

    def make(**options):
        return make_core(**{"num_window_blocks": 12, "window": 6, "max_num_batched_tokens": 8, **options})

    return make


def windows_of(core):
    return core.scheduler.kv_cache_manager.bounded[0]


def blocks_in(copies):
    """Return (source, target) of the copied blocks of the first group."""
    return [(source, target) for group, source, target in copies if group == 0]


def parts_in(copies):
    """Return (source, target) of the copied blocks of the second group."""
    return [(source, target) for group, source, target in copies if group == 1]


def check(core):
    assert invariants.check(core.scheduler) == []


@pytest.mark.turn(8)
def test_long_output_holds_only_its_window_blocks(make_windowed):
    core = make_windowed(num_window_blocks=5)
    request = core.add("a", 21, max_tokens=300)
    most = 0
    while core.scheduler.has_work():
        core.step()
        check(core)
        most = max(most, round(5 * windows_of(core).usage))
    assert core.finished == {"a": "length"}
    assert request.sequence.num_output_tokens == 300
    assert most == 3


def test_worker_gets_window_block_ids_in_step_that_allocates_them(make_windowed):
    core = make_windowed()
    request = core.add("a", 10, max_tokens=12)
    [new] = core.step().scheduled_new_reqs
    assert new.block_ids == [request.sequence.block_table, [0, 1]]
    told = [core.step().scheduled_cached_reqs.new_block_ids[1] for _ in range(12)]
    assert [index for index, [parts] in enumerate(told) if parts] == [0, 3, 7, 11]
    assert all(len(parts) <= 1 for [parts] in told)


def test_no_window_group_exists_by_default():
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), num_blocks=9, max_model_len=99, clock=lambda: 0.0)
    assert scheduler.kv_cache_manager.bounded == []
    assert len(KVCacheManager(9, 4).groups) == 1


def test_steps_without_windows_carry_one_block_table(make_core):
    core = make_core()
    core.add("a", 10)
    assert len(core.step().scheduled_new_reqs[0].block_ids) == 1
    assert len(core.step().scheduled_cached_reqs.new_block_ids) == 1


def test_prefix_hit_holds_its_window_blocks(make_windowed):
    core = make_windowed()
    core.add("a", list(range(30)), max_tokens=1)
    core.run()
    request = core.add("b", [*range(28), 99], max_tokens=1)
    core.step()
    assert request.sequence.num_cached_tokens == 28
    assert core.log.of_type(events.PrefixCacheQueried)[-1].num_hit_tokens == 28
    check(core)


def test_prefix_hit_misses_evicted_window_until_recomputed(make_windowed):
    core = make_windowed(num_window_blocks=5)
    core.add("a", list(range(30)), max_tokens=1)
    core.run()
    core.add("other", 30, max_tokens=1)
    core.run()  # takes every window block
    for name, num_hit in (("b", 0), ("c", 28)):
        request = core.add(name, [*range(28), 99], max_tokens=1)
        core.run()
        assert request.sequence.num_cached_tokens == num_hit
        check(core)


def test_request_without_enough_window_blocks_takes_none(make_windowed):
    core = make_windowed(num_window_blocks=6, max_num_seqs=3)
    first, second = core.add("a", 10, max_tokens=40), core.add("b", 10, max_tokens=40)
    for _ in range(2):
        core.step()
        check(core)
    assert [len(request.sequence.block_table) for request in (first, second)] == [3, 0]
    assert core.log.of_type(events.RequestBlocked)[-1].reason == events.WaitReason.NO_BLOCKS
    core.run()
    assert core.finished == {"a": "length", "b": "length"}


def test_missing_window_block_preempts_less_important_request(make_windowed):
    core = make_windowed(num_window_blocks=5, max_num_seqs=3, preemption="recompute")
    first, second = core.add("a", 3, max_tokens=40), core.add("b", 3, max_tokens=40)
    while core.scheduler.has_work():
        core.step()
        check(core)
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    assert [request.sequence.num_output_tokens for request in (first, second)] == [40, 40]


def test_protected_request_is_not_preempted_for_window_blocks(make_windowed):
    core = make_windowed(num_window_blocks=7, max_num_seqs=4, preemption="recompute", max_num_preemptions=1)
    requests = [core.add(name, 3, max_tokens=60) for name in "abcd"]
    while core.scheduler.has_work():
        core.step()
        check(core)
    assert max(request.num_preemptions for request in requests) == 1
    assert [request.sequence.num_output_tokens for request in requests] == [60] * 4


def test_reservation_includes_window_blocks(make_windowed):
    core = make_windowed(num_window_blocks=10, admission="reservation", max_num_seqs=4)
    requests = [core.add(name, 10, max_tokens=40) for name in "abc"]
    core.step()
    core.step()
    core.step()
    assert [len(core.scheduler.running), len(core.scheduler.waiting)] == [2, 1]  # 4 each, and 2 for a step
    core.run()
    assert [request.num_preemptions for request in requests] == [0, 0, 0]
    manager = core.scheduler.kv_cache_manager
    core.scheduler.admission.left(requests[0])  # a second time
    assert core.scheduler.admission._num_blocks == [0, 0]
    assert manager.bounded[0].usage == 0.0


@pytest.mark.parametrize(("store", "num_running"), [(None, 2), (Store(num_tokens=0, wants=True), 1)])
def test_reservation_keeps_window_blocks_for_saves(make_windowed, store, num_running):
    core = make_windowed(num_window_blocks=10, admission="reservation", max_num_seqs=4, connector=store)
    for name in "ab":
        core.add(name, 10, max_tokens=40)
    core.step()
    core.step()
    assert len(core.scheduler.running) == num_running  # 4 each, 2 for a step, and 1 for saves


def test_lone_reservation_is_always_admitted(make_windowed):
    core = make_windowed(num_window_blocks=5, admission="reservation")
    core.add("a", 10, max_tokens=40)
    core.add("b", 10, max_tokens=40)
    core.step()
    assert [len(core.scheduler.running), len(core.scheduler.waiting)] == [1, 1]
    core.run()
    assert core.finished == {"a": "length", "b": "length"}


def test_swapped_request_is_copied_out_and_in_with_its_window(make_windowed):
    core = make_windowed(num_host_blocks=20, preemption="swap", enable_prefix_caching=False)
    request = core.add("a", 18, max_tokens=9)
    for _ in range(3):
        core.step()
    table, parts = list(request.sequence.block_table), list(request.sequence.block_tables[1])
    assert (request.num_computed_tokens, parts[:2]) == (18, [NO_BLOCK] * 2)
    core.scheduler.faults.preempt(["a"])
    scheduled = core.step()
    copies = scheduled.copies
    host_block = dict(blocks_in(copies.swap_out))
    assert list(host_block) == table
    assert parts_in(copies.swap_out) == [(parts[3], host_block[table[3]]), (parts[4], host_block[table[4]])]
    copies = core.step().copies
    sequence = request.sequence
    assert [block for _, block in blocks_in(copies.swap_in)] == sequence.block_table[:5]
    assert parts_in(copies.swap_in) == [
        (host_block[table[3]], sequence.block_tables[1][3]),
        (host_block[table[4]], sequence.block_tables[1][4]),
    ]
    check(core)
    core.run()


def test_evicted_block_is_offloaded_with_window_part_if_present(make_windowed):
    core = make_windowed(num_blocks=9, num_window_blocks=9, num_host_blocks=9)
    core.add("a", list(range(16)), max_tokens=1)
    core.run()
    windows, table = windows_of(core), [0, 1, 2, 3]
    windows.block_forgotten(core.scheduler.kv_cache_manager.pool.blocks[table[0]])  # as if its part were evicted
    core.add("b", 34, max_tokens=1)
    copies = [core.step().copies for _ in range(5)]
    swapped = {block: host for each in copies for block, host in blocks_in(each.swap_out)}
    parts = [host for each in copies for _, host in parts_in(each.swap_out)]
    assert table[0] in swapped
    assert swapped[table[0]] not in parts
    assert [host for block, host in swapped.items() if block in table[1:]] == parts
    core.run()
    again = core.add("c", [*range(16), 99], max_tokens=5)
    copies = core.scheduler.schedule().copies
    assert again.sequence.num_cached_tokens == 16
    assert [host for host, _ in blocks_in(copies.swap_in)] == [swapped[block_id] for block_id in table]
    assert parts_in(copies.swap_in) == [
        (swapped[table[index]], again.sequence.block_tables[1][index]) for index in (2, 3)
    ]  # position 16 sees 11 to 16
    check(core)


def test_host_block_without_window_part_is_replaced_by_complete_one(make_core):
    pool = make_core(num_host_blocks=2).scheduler.kv_cache_manager
    [block] = pool.pool.take(1)
    pool.pool.register(block, b"h", (1, 2, 3, 4), None)
    assert pool.host.keep(block) == 0
    assert pool.host.keep(block) is None
    assert pool.host.indexed(b"h").groups == {0}
    assert pool.host.keep(block, frozenset({0, 1})) == 0
    assert pool.host.indexed(b"h").groups == {0, 1}
    assert pool.host.keep(block, frozenset({0, 1})) is None
    assert pool.host.keep(block) is None


def test_partial_block_is_copied_with_its_window_part(make_windowed):
    core = make_windowed(cache_decoded_blocks=False)
    first = core.add("a", list(range(7)), max_tokens=20)
    core.step()
    second = core.add("b", list(range(7)), max_tokens=20)
    copies = core.step().copies
    assert blocks_in(copies.block_copies) == [(first.sequence.block_table[1], second.sequence.block_table[1])]
    assert parts_in(copies.block_copies) == [(first.sequence.block_tables[1][1], second.sequence.block_tables[1][1])]
    assert first.sequence.block_tables[1][0] == second.sequence.block_tables[1][0]
    for _ in range(8):
        core.step()
    third = core.add("c", list(range(7)), max_tokens=20)
    core.step()
    assert third.sequence.num_cached_tokens == 4  # the first request no longer sees its partly filled block
    check(core)


def test_last_prompt_block_is_copied_with_its_window_part(make_windowed):
    core = make_windowed()
    core.add("a", list(range(8)), max_tokens=1)
    core.run()
    second = core.add("b", list(range(8)), max_tokens=2)
    copies = core.step().copies
    assert second.sequence.num_cached_tokens == 7
    [(source, target)] = parts_in(copies.block_copies)
    assert (source, target) == (1, second.sequence.block_tables[1][1])


def test_source_of_block_copy_is_evicted_last(make_windowed):
    core = make_windowed()
    for prompt in (range(8), range(100, 108)):
        core.add(str(prompt), list(prompt), max_tokens=1)
        core.run()
    assert windows_of(core).cached_ids() == [1, 0, 3, 2]
    core.add("b", list(range(8)), max_tokens=2)
    assert [source for source, _ in parts_in(core.step().copies.block_copies)] == [1]
    assert windows_of(core).cached_ids() == [3, 2, 1]


# --- stores -----------------------------------------------------------------------------------------------------------


def end(core, scheduled, transfer_id, num_blocks):
    result = core.compute(scheduled)
    result.kv_transfers.append(EndedTransfer(transfer_id, num_blocks))
    core.scheduler.update_from_output(scheduled, result)


@pytest.mark.parametrize(("num_loaded", "num_computed"), [(5, 20), (4, 0), (1, 0)])
def test_load_brings_visible_window_parts_and_counts_only_with_them(make_windowed, num_loaded, num_computed):
    core = make_windowed(connector=Store(num_tokens=20))
    request = core.add("a", 30)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    assert order.block_ids[1] == [-1, -1, -1, 0, 1]  # position 20 sees 15 to 20
    check(core)
    end(core, scheduled, order.transfer_id, num_loaded)
    assert request.num_computed_tokens == num_computed
    check(core)
    core.run()
    assert core.finished == {"a": "length"}
    assert windows_of(core).usage == 0.0


@pytest.mark.parametrize("num_then", [4, 3])
def test_load_that_ended_early_is_retried_once_for_fewer_blocks(make_windowed, num_then):
    core = make_windowed(connector=Store(num_tokens=20))
    request = core.add("a", 30)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    end(core, scheduled, order.transfer_id, 4)
    assert core.scheduler.transfers.num_records == 1
    scheduled = core.scheduler.schedule()
    [second] = scheduled.kv_transfers
    assert (second.keys, second.block_ids[1][:2]) == (order.keys[:4], [-1, -1])  # position 16 sees 11 to 16
    assert NO_BLOCK not in second.block_ids[1][2:]
    check(core)
    end(core, scheduled, second.transfer_id, num_then)
    assert request.num_computed_tokens == (16 if num_then == 4 else 0)
    assert core.step().kv_transfers == []
    core.run()
    check(core)
    assert core.scheduler.transfers.num_records == 0


@pytest.mark.parametrize(("num_loaded", "params"), [(0, None), (4, KVTransferParams("a", is_prefill=False))])
def test_empty_or_paired_load_is_not_retried(make_windowed, num_loaded, params):
    core = make_windowed(connector=Store(num_tokens=20))
    core.add("a", 30, kv_transfer_params=params)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    end(core, scheduled, order.transfer_id, num_loaded)
    assert core.step().kv_transfers == []
    core.run()


def test_aborted_request_drops_pending_load_retry(make_windowed):
    core = make_windowed(connector=Store(num_tokens=20))
    core.add("a", 30)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    end(core, scheduled, order.transfer_id, 4)
    core.scheduler.abort_request("a")
    assert core.scheduler.transfers.num_records == 0


def test_load_retry_accounts_for_local_prefix_hit(make_windowed):
    core = make_windowed(connector=Store(num_tokens=0))
    core.add("a", list(range(8)), max_tokens=1)
    core.run()
    core.scheduler.transfers._connector.num_tokens = 28
    request = core.add("b", [*range(8), *range(100, 130)])
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    assert len(order.keys) == 5
    end(core, scheduled, order.transfer_id, 4)
    scheduled = core.scheduler.schedule()
    [second] = scheduled.kv_transfers
    assert second.keys == order.keys[:4] == request.block_hashes[2:6]
    end(core, scheduled, second.transfer_id, 4)
    assert core.scheduler.transfers._most_loaded == {}


@pytest.mark.parametrize("num_loaded", [1, 2])
def test_partial_load_counts_if_window_covers_all_of_it(make_windowed, num_loaded):
    core = make_windowed(connector=Store(num_tokens=8), window=20)
    request = core.add("a", 30)
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    end(core, scheduled, order.transfer_id, num_loaded)
    assert request.num_computed_tokens == 4 * num_loaded


def test_load_of_complete_prompt_brings_window_of_last_token(make_windowed):
    core = make_windowed(connector=Store(num_tokens=20))
    core.add("a", 20)
    [order] = core.scheduler.schedule().kv_transfers
    assert order.block_ids[1] == [NO_BLOCK] * 3 + [0, 1]  # position 19 sees 14 to 19


def test_save_pins_window_blocks_after_request_released_them(make_windowed):
    core = make_windowed(connector=Store(num_tokens=0, wants=True), num_window_blocks=24)
    request = core.add("a", 24, max_tokens=1)
    core.step()
    parts = list(request.sequence.block_tables[1])
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    assert order.block_ids[1] == parts[:2]
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    check(core)
    assert request.sequence.block_tables[1][0] == NO_BLOCK
    assert windows_of(core).num_holders(parts[0]) == 1
    scheduled = core.scheduler.schedule()
    end(core, scheduled, order.transfer_id, 2)
    assert windows_of(core).num_holders(parts[0]) == 0
    check(core)


def test_block_without_window_part_is_not_saved(make_windowed):
    store = Store(num_tokens=0)
    core = make_windowed(connector=store, num_window_blocks=24)
    request = core.add("a", 24, max_tokens=1)
    manager = core.scheduler.kv_cache_manager
    core.step()
    core.step()
    windows_of(core).block_forgotten(manager.pool.blocks[request.sequence.block_table[0]])  # as if evicted
    assert (request.num_computed_tokens, request.sequence.first_held[1]) == (16, 2)
    assert [manager.bounded[0].id_at(request.sequence, index) for index in range(4)] == [None, 1, 2, 3]
    store.wants = True
    scheduled = core.step()
    assert scheduled.kv_transfers == []


def test_step_event_reports_window_block_usage(make_windowed):
    core = make_windowed(num_window_blocks=5)
    core.add("a", 8, max_tokens=2)
    core.run()
    assert [each.bounded_usage for each in core.log.of_type(events.StepScheduled)] == [2 / 5, 3 / 5]


@pytest.mark.parametrize(("window", "num_behind"), [(4, 4), (5, 3)])
def test_load_of_complete_prompt_reaches_back_as_far_as_window(make_windowed, window, num_behind):
    core = make_windowed(connector=Store(num_tokens=20), window=window)
    core.add("a", 20)
    [order] = core.scheduler.schedule().kv_transfers
    assert [part == NO_BLOCK for part in order.block_ids[1]] == [index < num_behind for index in range(5)]


def test_saves_pin_at_most_one_eighth_of_window_blocks(make_windowed):
    core = make_windowed(connector=Store(num_tokens=0, wants=True), num_window_blocks=16, max_num_batched_tokens=32)
    core.add("a", 24, max_tokens=1)
    core.step()
    [order] = core.scheduler.schedule().kv_transfers
    assert len(order.keys) == len(order.block_ids[1]) == 2


def test_reset_prefix_cache_drops_window_parts(make_windowed):
    core = make_windowed()
    core.add("a", 10, max_tokens=1)
    core.run()
    assert windows_of(core).cached_ids()
    assert core.scheduler.reset_prefix_cache()
    assert (windows_of(core).cached_ids(), windows_of(core).parts()) == ([], {})
    check(core)


def test_resumed_request_shares_complete_blocks_and_swaps_in_rest(make_windowed):
    core = make_windowed(num_host_blocks=20, preemption="swap", num_window_blocks=20, max_num_batched_tokens=16)
    request = core.add("a", 15, max_tokens=9)
    core.step()
    core.step()
    table = list(request.sequence.block_table)
    core.scheduler.faults.preempt(["a"])
    core.step()
    manager = core.scheduler.kv_cache_manager
    manager.bounded[0].block_forgotten(manager.pool.blocks[table[2]])  # as if its part were evicted
    core.step()
    assert request.num_computed_tokens == 17
    assert request.sequence.block_table[:2] == table[:2]
    assert request.sequence.block_table[2] != table[2]
    check(core)


def test_host_memory_hit_ends_at_missing_window_part(make_windowed):
    core = make_windowed(num_blocks=9, num_window_blocks=9, num_host_blocks=9)
    core.add("a", list(range(20)), max_tokens=1)
    core.run()
    manager = core.scheduler.kv_cache_manager
    windows_of(core).block_forgotten(manager.pool.blocks[4])  # as if its part were evicted
    core.add("b", 34, max_tokens=1)
    core.run()
    again = core.add("c", [*range(20), 99], max_tokens=5)
    copies = core.scheduler.schedule().copies
    assert again.sequence.num_cached_tokens == 16
    assert len(blocks_in(copies.swap_in)) == 4


@pytest.mark.parametrize("how", ["quarantine", "_orphan", "evict"])
def test_block_removed_from_prefix_cache_loses_its_window_part(make_windowed, how):
    core = make_windowed()
    core.add("a", 8, max_tokens=1)
    core.run()
    pool, windows = core.scheduler.kv_cache_manager.pool, windows_of(core)
    getattr(pool, how)(pool.blocks[1])
    assert (windows.parts(), windows.cached_ids(), windows.num_free_blocks) == ({0: 0}, [0], 12)
    check(core)


def found(core, request_id, prompt, max_tokens=3):
    """Run a request to its end; return how many tokens of its prompt were found."""
    request = core.add(request_id, list(prompt), max_tokens=max_tokens)
    core.run()
    check(core)
    return request.sequence.num_cached_tokens


def test_conversation_hits_its_last_turn_despite_many_other_windows(make_windowed):
    core = make_windowed(num_window_blocks=60)
    conversations = [list(range(1000 * number, 1000 * number + 81)) for number in range(6)]  # 120 blocks and more
    for turn in range(3):
        for number, conversation in enumerate(conversations):
            num_found = found(core, f"{turn}-{number}", conversation)
            assert num_found == (0 if turn == 0 else len(conversation) // 4 * 4 - 4)
            conversation.extend([9000 + turn] * 4)


@pytest.mark.parametrize("num_tokens", [80, 81, 82, 83])
def test_prompt_hits_up_to_its_last_full_block(make_windowed, num_tokens):
    core = make_windowed(num_window_blocks=20)
    found(core, "a", range(num_tokens), max_tokens=1)
    found(core, "b", range(1000, 1080), max_tokens=1)
    assert found(core, "c", [*range(num_tokens), 99, 98], max_tokens=1) == 80


def test_common_prefix_stays_cached_across_branches(make_windowed):
    core, common = make_windowed(num_window_blocks=20), list(range(40))
    found(core, "first", common, max_tokens=1)
    for number in range(6):
        branch = [*common, *range(1000 * number + 1000, 1000 * number + 1060)]  # 15 blocks after the common ones
        assert found(core, str(number), branch, max_tokens=1) == 40


def test_prefix_found_by_protected_request_stays_shared(make_windowed):
    core, common = make_windowed(num_window_blocks=40, window=60, max_num_preemptions=0), list(range(25))
    found(core, "first", common, max_tokens=1)
    core.add("long", [*common, 1], max_tokens=150)
    core.step()
    others = [core.add(name, [*common, token], max_tokens=4) for name, token in (("a", 2), ("b", 3))]
    for _ in range(20):
        core.step()
        check(core)
    assert [request.sequence.num_cached_tokens for request in others] == [24, 24]
    assert [core.finished.get(name) for name in ("long", "a", "b")] == [None, "length", "length"]
    core.run()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_window_blocks", [5, 6, 7, 8])
def test_protected_request_with_prefix_hit_runs_in_minimal_window_blocks(make_windowed, num_window_blocks):
    core = make_windowed(num_window_blocks=num_window_blocks, max_num_preemptions=0)
    found(core, "first", range(25), max_tokens=1)
    requests = [core.add(name, [*range(25), token], max_tokens=40) for name, token in (("a", 1), ("b", 2))]
    while core.scheduler.has_work():
        core.step()
        check(core)
    assert requests[0].sequence.num_cached_tokens == 24
    assert [request.sequence.num_output_tokens for request in requests] == [40, 40]
    assert [request.num_preemptions for request in requests] == [0, 0]


def test_preempted_request_keeps_no_record_of_sent_blocks(make_windowed):
    core = make_windowed()
    core.add("a", 8)
    core.step()
    core.scheduler.faults.preempt(["a"])
    core.step()
    assert core.scheduler._state.builder.num_records == 0
    [new] = core.step().scheduled_new_reqs
    assert len(new.block_ids[1]) == 3


# --- host memory ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("num_blocks", "num_window_blocks"), [(100, 100), (100, 30), (100, 12), (1000, 12)])
def test_host_memory_restores_evicted_window_parts(make_core, num_blocks, num_window_blocks):
    core = make_core(
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks,
        num_host_blocks=400,
        window=20,
        max_num_batched_tokens=16,
        max_num_seqs=1,
    )
    prompts = [list(range(1000 * number, 1000 * number + 101)) for number in range(8)]  # 208 blocks
    schedule, copies = core.scheduler.schedule, []
    core.scheduler.schedule = lambda: (copies.append((each := schedule()).copies), each)[1]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            assert found(core, f"{turn}-{number}", prompt, max_tokens=1) == 100 * turn
    assert sum(event.num_tokens for event in core.log.of_type(events.HostBlocksFound)) > 0
    num_out = sum((1 in event.groups) for event in core.log.of_type(events.BlockOffloaded))
    num_in = sum(event.num_copied[1] for event in core.log.of_type(events.HostBlocksFound))
    assert num_out == sum(len(parts_in(each.swap_out)) for each in copies) > 0
    assert num_in == sum(len(parts_in(each.swap_in)) for each in copies) > 0
    metrics = EngineMetrics()
    for event in core.log.events:
        metrics.emit(event)
    assert metrics.stats.num_offloaded_parts == {1: num_out}
    assert metrics.stats.host_cache_hit_parts == {1: num_in}


def test_block_losing_its_window_part_is_offloaded_with_it_once(make_windowed):
    core = make_windowed(num_window_blocks=5, num_host_blocks=20)
    core.add("a", list(range(16)), max_tokens=1)
    core.run()
    core.add("b", 16, max_tokens=1)
    copies = [core.step().copies for _ in range(2)]
    whole = [pair for each in copies for pair in blocks_in(each.swap_out)]
    parts = [(part, host) for each in copies for part, host in parts_in(each.swap_out)]
    assert [block for block, _ in whole] == [0, 1, 3]
    assert [host for _, host in whole] == [host for _, host in parts]
    manager = core.scheduler.kv_cache_manager
    for block_id in range(4):
        manager.pool.evict(manager.pool.blocks[block_id])
    assert [block for block, _ in blocks_in(manager.take_copies().swap_out)] == [2]
    check(core)


def test_block_copy_may_take_over_window_part_of_its_source(make_windowed):
    core = make_windowed(num_window_blocks=2)
    core.add("a", list(range(8)), max_tokens=1)
    core.run()
    second = core.add("b", list(range(8)), max_tokens=1)
    copies = core.step().copies
    assert second.sequence.num_cached_tokens == 7
    assert (len(copies.block_copies), parts_in(copies.block_copies)) == (1, [])
    core.run()
    check(core)


def test_evicting_block_without_window_part_refreshes_its_host_copy(make_windowed):
    core = make_windowed(num_host_blocks=20)
    for name, num_tokens in (("a", 8), ("b", 4)):
        core.add(name, num_tokens, max_tokens=1)
        core.run()
    manager = core.scheduler.kv_cache_manager
    _, last, other = blocks = manager.pool.blocks[:3]
    for block in blocks:
        manager.bounded[0].block_forgotten(block)
        manager.host.keep(block)
    names = [block.name for block in (last, other)]
    assert manager.host.cached_blocks()[-1].name == names[1]
    manager.pool.evict(last)
    assert manager.host.cached_blocks()[-1].name == names[0]


def test_block_without_window_part_is_offloaded_if_successor_is_in_host(make_windowed):
    core = make_windowed(num_host_blocks=20)
    core.add("a", list(range(16)), max_tokens=1)
    core.run()
    manager = core.scheduler.kv_cache_manager
    blocks = manager.pool.blocks
    for block in blocks[:4]:
        manager.bounded[0].block_forgotten(block)
    manager.pool.evict(blocks[3])
    assert manager.take_copies().swap_out == []
    kept = [
        manager.host.keep(block, frozenset({0, 1} if index == 2 else {0})) for index, block in enumerate(blocks[1:3], 1)
    ]
    manager.host.drop(kept[0])
    names = [block.name for block in blocks[1:3]]
    manager.pool.evict(blocks[2])  # host memory has it with its window part
    manager.pool.evict(blocks[1])
    assert [block for _, block, _ in manager.take_copies().swap_out] == [1]
    by_name = {block.name: block.groups == {0, 1} for block in manager.host.cached_blocks()}
    assert by_name == {names[0]: False, names[1]: True}
    assert manager.host.cached_blocks()[-1].name == names[0]


def test_unreachable_block_is_not_offloaded_with_its_window_part(make_windowed):
    core = make_windowed(num_window_blocks=5, num_host_blocks=20)
    core.add("a", list(range(16)), max_tokens=1)
    core.run()
    manager = core.scheduler.kv_cache_manager
    manager.pool.quarantine(manager.pool.blocks[0])
    core.add("b", 16, max_tokens=1)
    copies = [core.step().copies for _ in range(2)]
    assert [block for each in copies for block, _ in blocks_in(each.swap_out)] == [3]


def full_hit(core, num_tokens, *, lost, in_host, bare=(), evicted=()):
    """Return how many blocks of a sequence are usable, and how many were found on the device and in host memory.

    lost: blocks without their window part on the device. in_host: blocks in host memory with their window part; bare:
    in host memory without it. evicted: blocks that are evicted from the device.
    """
    core.add("a", list(range(num_tokens)), max_tokens=1)
    core.run()
    manager = core.scheduler.kv_cache_manager
    blocks = manager.pool.blocks
    for index in bare:
        manager.bounded[0].block_forgotten(blocks[index])
    for index in (*in_host, *bare):
        assert manager.host.keep(blocks[index], frozenset({0, 1} if index in in_host else {0})) is not None
    for index in evicted:
        manager.pool.evict(blocks[index])
    for index in lost:
        manager.bounded[0].block_forgotten(blocks[index])
    request = core.add("b", list(range(num_tokens)))
    full = manager.prefix_cache.find_full_blocks(request)
    computed = manager.prefix_cache.computed_blocks(request, full)
    assert computed.num_blocks + (computed.source is not None) == full.num_usable
    return full.num_usable, len(full.on_device), len(full.in_host)


@pytest.mark.parametrize(
    ("window", "lost", "in_host", "expected"),
    [
        (6, [0, 2], [2, 3], (4, 2, 2)),  # a request that resumes after the blocks on the device does not see block 0
        (9, [1], [1, 2, 3], (4, 1, 3)),  # its last token is computed and sees block 1
        (8, [1, 2], [2, 3], (4, 2, 2)),  # and here its last token does not
        (6, [2], [2], (3, 2, 1)),
        (6, [2], [1], (2, 4, 0)),  # host memory does not extend the hit
        (6, [1], [1], (4, 4, 0)),  # every part that the next row sees is present
    ],
)
def test_host_memory_supplies_window_parts_missing_on_device(make_windowed, window, lost, in_host, expected):
    core = make_windowed(window=window, max_num_batched_tokens=16, num_host_blocks=20)
    assert full_hit(core, 16, lost=lost, in_host=in_host) == expected


def test_host_memory_replaces_lost_part_and_extends_hit(make_windowed):
    core = make_windowed(max_num_batched_tokens=16, num_host_blocks=20)
    assert full_hit(core, 18, lost=[2], in_host=[2, 3], evicted=[3]) == (4, 2, 2)


def test_host_block_without_window_part_ends_usable_hit(make_windowed):
    core = make_windowed(max_num_batched_tokens=16, num_host_blocks=20)
    assert full_hit(core, 18, lost=[], in_host=[2], bare=[3], evicted=[2, 3]) == (3, 2, 2)


@pytest.mark.parametrize(("window", "num_found"), [(6, 13), (7, 4)])
def test_partial_block_hit_requires_window_of_last_token(make_windowed, window, num_found):
    core = make_windowed(window=window, max_num_batched_tokens=16)
    core.add("a", list(range(14)), max_tokens=2)
    core.step()
    manager = core.scheduler.kv_cache_manager
    manager.bounded[0].block_forgotten(manager.pool.blocks[1])
    found = manager.get_computed_blocks(core.add("b", list(range(14))))
    assert (found.num_tokens, found.source is None) == (num_found, window == 7)
