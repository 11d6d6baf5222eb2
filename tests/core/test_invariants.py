"""Each test breaks an invariant on purpose: the check reports its number and the blocks, and no other breach."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stores import Store

from octavo.core import invariants
from octavo.core.kv.block_pool import Block
from octavo.data.request import RequestStatus


@pytest.fixture
def core(make_core):
    """Four requests: one decodes in three blocks, one is preempted with its KV in host memory, one loads, one waits."""
    core = make_core(
        num_blocks=12, num_host_blocks=8, preemption="swap", max_num_seqs=2, connector=Store(prefix="loads")
    )
    core.add("runs", 8, max_tokens=5)
    core.add("swapped", 5)
    core.step()
    core.scheduler.faults.preempt(["swapped"])
    core.step()
    core.scheduler.finish_requests(["swapped"], RequestStatus.FINISHED_ABORTED)
    core.add("loads", list(range(12)))
    core.step()
    core.add("swapped", 5)
    assert core.scheduler.kv_cache_manager.swap_out(core.scheduler.requests["runs"])
    saved = core.scheduler.kv_cache_manager._saved
    saved["swapped"] = saved.pop("runs")
    core.scheduler.requests["swapped"].status = RequestStatus.PREEMPTED
    core.add("waits", 7)
    assert breaches(core) == []
    return core


def breaches(core):
    return [(breach.invariant, breach.block_ids) for breach in invariants.check(core.scheduler)]


def pool_of(core):
    return core.scheduler.kv_cache_manager.pool


def request_of(core, name):
    return core.scheduler.requests[name]


def table_of(core, name):
    return request_of(core, name).sequence.block_table


# --- 1, 5, 6: host memory ---------------------------------------------------------------------------------------------


@pytest.fixture
def with_cached(core):
    """The same core, with a block in host memory that is also on the device."""
    manager = core.scheduler.kv_cache_manager
    block = manager.pool.blocks[table_of(core, "runs")[0]]
    assert manager.host.keep(block) is not None
    assert breaches(core) == []
    return core


def host_of(core):
    host = core.scheduler.kv_cache_manager.host
    [block] = host.cached_blocks()
    return host, block


def test_host_block_in_two_places_is_reported(with_cached):
    host, block = host_of(with_cached)
    host._free.append(block.block_id)
    assert breaches(with_cached) == [(1, ())]


def test_cached_host_block_without_index_entry_is_reported(with_cached):
    host, block = host_of(with_cached)
    del host._index[block.hash]
    assert breaches(with_cached) == [(5, ())]


def test_index_entry_without_cached_host_block_is_reported(with_cached):
    host, block = host_of(with_cached)
    host._index[b"more"] = block
    assert breaches(with_cached) == [(5, ())]


def test_index_entry_of_other_host_block_is_reported(with_cached):
    host, block = host_of(with_cached)
    host._index[block.hash] = replace(block)
    assert breaches(with_cached) == [(5, ())]


@pytest.mark.parametrize("part", ["token_ids", "extra_keys", "parent"])
def test_key_with_other_content_in_host_memory_is_reported(with_cached, part):
    host, block = host_of(with_cached)
    other = {"token_ids": (9, 9, 9, 9), "extra_keys": ("salt:x",), "parent": (3, 3)}
    changed = replace(block, **{part: other[part]})
    host._index[block.hash] = host._cached[block.block_id] = changed
    assert breaches(with_cached) == [(6, (table_of(with_cached, "runs")[0],))]
    [breach] = invariants.check(with_cached.scheduler)
    assert breach.message.endswith("has the key of other content in host memory")


def test_indexed_host_block_that_is_not_full_is_reported(with_cached):
    host, block = host_of(with_cached)
    changed = replace(block, token_ids=block.token_ids[:3], name=(99, 99))
    host._index[block.hash] = host._cached[block.block_id] = changed
    assert breaches(with_cached) == [(5, ())]


# --- 1, 2, 5: blocks --------------------------------------------------------------------------------------------------


def test_block_in_two_places_is_reported(core):
    pool = pool_of(core)
    pool._free.append(pool._free[0])
    assert breaches(core) == [(1, (pool._free[0].block_id,))]


def test_block_in_no_place_is_reported(core):
    lost = pool_of(core)._free.pop()
    assert breaches(core) == [(1, (lost.block_id,))]


def test_duplicate_and_missing_block_are_both_reported(core):
    pool = pool_of(core)
    lost, doubled = pool._free[:2]
    pool._free[0] = doubled
    assert breaches(core) == [(1, tuple(sorted((lost.block_id, doubled.block_id))))]


def test_free_block_that_is_not_of_pool_is_reported(core):
    pool_of(core)._free.append(Block(99))
    assert breaches(core) == [(1, ())]


def test_quarantined_block_in_free_list_is_reported(core):
    pool = pool_of(core)
    held = pool.blocks[table_of(core, "runs")[1]]
    for block in (held, pool._free[0]):
        pool.quarantine(block)
    assert breaches(core) == []
    pool._free.append(held)
    assert breaches(core) == [(1, (held.block_id,))]


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_reference_count_is_reported(core, change):
    last = table_of(core, "runs")[-1]
    pool_of(core).blocks[last].ref_count += 3
    table_of(core, "swapped")  # this request holds no block
    assert breaches(core) == [(2, (last,)), (4, (last,))]
    loaded = table_of(core, "loads")[0]
    pool_of(core).blocks[last].ref_count -= 3
    pool_of(core).blocks[loaded].ref_count += change
    found = breaches(core)
    assert found[0] == (2, (loaded,))
    [breach] = [each for each in invariants.check(core.scheduler) if each.invariant == 2]
    assert str([(loaded, 2 + change, 2)]) in breach.message


def test_references_of_quarantined_block_are_not_counted(core):
    block = pool_of(core).blocks[table_of(core, "runs")[0]]
    pool_of(core).quarantine(block)
    block.ref_count += 1
    assert breaches(core) == []


def test_hash_indexed_for_other_block_is_reported(core):
    pool = pool_of(core)
    first, second = (pool.blocks[block_id] for block_id in table_of(core, "runs")[:2])
    pool._index[first.hash] = second
    assert breaches(core) == [(5, (first.block_id,))]


def test_index_entry_of_block_without_hash_is_reported(core):
    pool_of(core)._index[b"left behind"] = pool_of(core).blocks[0]
    assert breaches(core) == [(5, ())]


@pytest.mark.parametrize("token_ids", [(1, 2, 3), (1, 2, 3, 4, 5)])
def test_indexed_block_that_is_not_full_is_reported(core, token_ids):
    block = pool_of(core).blocks[table_of(core, "runs")[0]]
    block.token_ids = token_ids
    assert breaches(core) == [(5, (block.block_id,))]


# --- 3, 4: block tables -----------------------------------------------------------------------------------------------


def test_too_short_block_table_is_reported(core):
    request = request_of(core, "runs")
    assert (len(request.sequence.block_table), request.num_computed_tokens) == (3, 10)
    pool = pool_of(core)
    pool.release([pool.blocks[request.sequence.block_table.pop()]])
    assert breaches(core) == [(3, ())]
    request.num_computed_tokens = 8
    assert breaches(core) == []


def test_too_long_block_table_is_reported(core):
    request = request_of(core, "runs")  # 8 tokens and at most 5 more: 4 blocks
    for expected in ([], [(3, ())]):
        [block] = pool_of(core).take(1)
        request.sequence.block_table.append(block.block_id)
        assert breaches(core) == expected
    request.spec_token_ids = [1] * 7
    assert breaches(core) == []  # drafts count
    request.spec_token_ids = []
    request.max_total_tokens = 17
    assert breaches(core) == []


def test_block_twice_in_block_table_is_reported(core):
    table = table_of(core, "runs")
    table.append(table[0])
    pool_of(core).blocks[table[0]].ref_count += 1
    assert breaches(core) == [(3, tuple(table)), (4, (table[0],))]


def test_indexed_block_that_is_still_written_is_reported(core):
    pool, table = pool_of(core), table_of(core, "runs")
    block = pool.blocks[table[2]]
    pool.register(block, b"too early", (1, 2, 3, 4), None)
    assert breaches(core) == [(4, (block.block_id,))]
    request_of(core, "runs").num_computed_tokens = 11
    request_of(core, "runs").sequence.token_ids += [1, 2]
    assert breaches(core) == [(4, (block.block_id,))]
    request_of(core, "runs").num_computed_tokens = 12
    assert breaches(core) == []


def test_unwritten_block_with_other_holder_is_reported(core):
    pool, table = pool_of(core), table_of(core, "loads")
    request_of(core, "loads").status = RequestStatus.RUNNING
    assert [each for each in breaches(core) if each[0] == 4] == [(4, (block_id,)) for block_id in table]
    request_of(core, "loads").status = RequestStatus.WAITING_FOR_REMOTE_KVS
    pool.blocks[table[1]].ref_count += 1
    assert breaches(core) == [(2, (table[1],)), (4, (table[1],))]


# --- 1, 10: host memory -----------------------------------------------------------------------------------------------


def test_missing_or_duplicate_free_host_block_is_reported(core):
    host = core.scheduler.kv_cache_manager.host
    lost = host._free.pop()
    assert breaches(core) == [(1, ())]
    host._free += [lost, lost]
    assert breaches(core) == [(1, ())]


def test_saved_kv_without_preempted_request_is_reported(core):
    request_of(core, "swapped").status = RequestStatus.WAITING
    assert breaches(core) == [(10, ())]
    saved = core.scheduler.kv_cache_manager._saved
    saved["nobody"] = saved.pop("swapped")
    assert breaches(core) == [(10, ())]


# --- 9 to 12: requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status"), [("waits", "RUNNING"), ("runs", "WAITING"), ("runs", "PREEMPTED"), ("loads", "RUNNING")]
)
def test_status_that_contradicts_queue_is_reported(core, name, status):
    request_of(core, name).status = RequestStatus[status]
    found = {invariant for invariant, _ in breaches(core)}
    assert found == ({12, 4} if name == "loads" else {12})  # the blocks of "loads" are counted as held twice


def test_waiting_request_with_drafts_blocks_or_computed_tokens_is_reported(core):
    request = request_of(core, "waits")
    request.spec_token_ids = [1]
    core.scheduler.waiting_requests.num_tokens += 1
    assert breaches(core) == [(10, ())]
    core.scheduler.waiting_requests.num_tokens -= 1
    request.spec_token_ids = []
    [block] = pool_of(core).take(1)
    request.sequence.block_table.append(block.block_id)
    assert breaches(core) == [(10, ())]
    request.sequence.block_table.clear()
    pool_of(core).release([block])
    request.num_computed_tokens = 1
    assert breaches(core) == [(3, ()), (10, ())]


@pytest.mark.parametrize("num_computed", [-1, 11])
def test_running_request_with_invalid_computed_tokens_is_reported(core, num_computed):
    request = request_of(core, "runs")
    assert request.num_tokens == 11
    request.num_computed_tokens = num_computed
    found = breaches(core)
    assert found[-1] == (9, ())
    assert {invariant for invariant, _ in found} <= {4, 9}  # at -1 its last full block would be written again


def test_running_request_may_have_no_computed_tokens(core):
    request = request_of(core, "runs")
    pool = pool_of(core)
    pool.release([pool.blocks[block_id] for block_id in reversed(request.sequence.block_table)])
    request.sequence.block_table.clear()
    request.num_computed_tokens = 0
    assert breaches(core) == []


@pytest.mark.parametrize("place", ["running", "waiting", "loading"])
def test_request_in_no_state_or_two_states_is_reported(core, place):
    scheduler = core.scheduler
    request = request_of(core, {"running": "runs", "waiting": "waits", "loading": "loads"}[place])
    if place == "running":
        scheduler.running.append(request)
        scheduler.config = replace(scheduler.config, max_num_seqs=8)
    elif place == "waiting":
        scheduler.waiting_requests._deferred["again"] = type("Deferred", (), {"request": request})()
        scheduler.waiting_requests.num_tokens += request.num_tokens
    else:
        scheduler.transfers._pending[77] = scheduler.transfers._pending[0]
        scheduler.config = replace(scheduler.config, max_num_seqs=8)
    assert breaches(core) == [(12, ())]
    if place == "waiting":
        scheduler.waiting_requests._deferred.clear()
        scheduler.waiting_requests.remove(request)
        scheduler.waiting_requests.num_tokens += request.num_tokens
    elif place == "running":
        scheduler.running.clear()
    else:
        scheduler.transfers._pending.clear()
    [breach] = [each for each in invariants.check(scheduler) if each.invariant == 12]
    assert f"requests in no state or in several states: {{{request.request_id!r}}}, " in breach.message


# --- 13, 14: limits ---------------------------------------------------------------------------------------------------


def test_more_requests_than_max_num_seqs_are_reported(core):
    scheduler = core.scheduler
    assert len(scheduler.running) + len(scheduler.transfers) == scheduler.config.max_num_seqs
    scheduler.config = replace(scheduler.config, max_num_seqs=1)
    [breach] = invariants.check(scheduler)
    assert breach.invariant == 13
    assert breach.message == "1 run, 1 load; the limit is 1"


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_number_of_waiting_tokens_is_reported(core, change):
    core.scheduler.waiting_requests.num_tokens += change
    assert breaches(core) == [(13, ())]


def test_wrong_sum_of_reservations_is_reported(make_core):
    core = make_core(num_blocks=12, admission="reservation", max_batch_total_tokens=40, connector=Store(prefix="loads"))
    core.add("runs", 9, max_tokens=4)
    core.add("loads", 12, max_tokens=15)
    core.step()
    admission = core.scheduler.admission
    assert admission.num_reserved_total == 40
    assert breaches(core) == []
    admission.num_reserved_total -= 1
    assert breaches(core) == [(13, ())]
    admission.num_reserved_total += 2
    assert breaches(core) == [(13, ()), (13, ())]


def test_waiting_request_larger_than_cache_is_reported(core):
    request = request_of(core, "waits")
    room, capacity = core.scheduler.waiting_requests, core.scheduler.kv_cache_manager.capacity_tokens
    for num_tokens, expected in ((capacity + 1, []), (capacity + 2, [(14, ())])):
        room.num_tokens += num_tokens - request.num_tokens
        request.sequence.token_ids[:] = [1] * num_tokens
        assert breaches(core) == expected


# --- 18: idle ---------------------------------------------------------------------------------------------------------


def test_blocks_held_when_idle_are_reported(make_core):
    core = make_core(num_blocks=4)
    core.add("a", 5, max_tokens=1)
    core.run()
    blocks = pool_of(core).take(2)
    ids = tuple(sorted(block.block_id for block in blocks))
    assert breaches(core) == [(2, ids), (18, ids)]
    for block in blocks:
        pool_of(core).quarantine(block)
    assert breaches(core) == []


def test_state_of_unknown_request_is_reported_when_idle(make_core):
    core = make_core(num_blocks=4)
    core.scheduler._state.builder._num_sent["gone"] = [1]
    assert breaches(core) == [(18, ())]
    core.add("a", 5)
    core.step()
    assert breaches(core) == []  # a request exists: the idle check is skipped


def test_idle_check_is_skipped_while_transfer_pins_blocks(make_core):
    core = make_core(num_blocks=4)
    manager = core.scheduler.kv_cache_manager
    blocks = manager.pool.take(1)
    manager.pin(7, [[blocks[0].block_id]])
    manager.pool.release(blocks)
    core.scheduler._state.builder._num_sent["gone"] = [1]
    assert breaches(core) == []
    manager.unpin(7)
    assert breaches(core) == [(18, ())]


# --- 1, 2, 5, 18: window blocks ---------------------------------------------------------------------------------------


@pytest.fixture
def windowed(make_core):
    """One request has ended, and its window blocks 0 and 1 are cached. Another holds 2 and 3. 4 and 5 are free."""
    core = make_core(num_window_blocks=6, window=6)
    core.add("ended", 8, max_tokens=1)
    core.run()
    core.add("runs", 8, max_tokens=2)
    core.step()
    assert window_breaches(core) == []
    windows = core.scheduler.kv_cache_manager.bounded[0]
    assert (windows.cached_ids(), windows.free_ids()) == ([1, 0], [5, 4])
    return core


def window_breaches(core):
    return [(breach.invariant, breach.block_ids) for breach in invariants.check(core.scheduler)]


def doubled(windows):
    windows._free.append(5)


def lost(windows):
    windows._free.remove(5)


def one_for_another(windows):
    windows._free[0] = 4


def unknown(windows):
    windows._free.append(6)


def held_too_often(windows):
    windows._num_holders[3] += 1


def of_two_blocks(windows):
    windows._id_of[9] = 2


def of_another_block(windows):
    windows._block_of[2] = 9


def free_and_a_part(windows):
    windows._id_of[9], windows._block_of[5] = 5, 9


def cached_and_no_part(windows):
    del windows._id_of[windows._block_of[1]]
    windows._block_of[1] = None


def cached_and_not_findable(windows):
    windows._blocks[windows._block_of[1]].hash = None


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (doubled, [(1, (5,))]),
        (lost, [(1, (5,))]),
        (one_for_another, [(1, (4, 5))]),
        (unknown, [(1, ())]),
        (held_too_often, [(2, (3,))]),
        (of_two_blocks, [(5, (2,))]),
        (of_another_block, [(5, (2,))]),
        (free_and_a_part, [(5, (5,))]),
        (cached_and_no_part, [(5, (1,))]),
    ],
)
def test_window_blocks_with_wrong_bookkeeping_are_reported_and_quarantined(windowed, break_it, found):
    break_it(windowed.scheduler.kv_cache_manager.bounded[0])
    assert window_breaches(windowed) == found
    for breach in invariants.check(windowed.scheduler):
        invariants.quarantine(windowed.scheduler, breach)
    if found != [(1, ())]:
        assert window_breaches(windowed) == []


def test_cached_window_block_of_unfindable_block_is_reported(windowed):
    cached_and_not_findable(windowed.scheduler.kv_cache_manager.bounded[0])
    assert (5, (1,)) in window_breaches(windowed)


def test_breach_message_shows_reference_count_of_window_block(windowed):
    held_too_often(windowed.scheduler.kv_cache_manager.bounded[0])
    assert [breach.message for breach in invariants.check(windowed.scheduler)] == [
        "(block of group 1, holds, holders): [(3, 2, 1)]"
    ]


def test_18_window_blocks_held_when_idle_are_reported(windowed):
    held_too_often(windowed.scheduler.kv_cache_manager.bounded[0])
    windowed.run()
    assert window_breaches(windowed) == [(2, (3,)), (18, (3,))]
    windowed.scheduler.check_when_idle()
    assert window_breaches(windowed) == []


def test_check_does_not_scan_all_parts_for_each_window_block(windowed):
    windows = windowed.scheduler.kv_cache_manager.bounded[0]

    class Parts(dict):
        def values(self):
            raise AssertionError("a walk for each of them")

    windows.parts = lambda parts=windows.parts: Parts(parts())
    assert window_breaches(windowed) == []


def test_quarantine_returns_only_blocks_of_first_group(windowed):
    held_too_often(windowed.scheduler.kv_cache_manager.bounded[0])
    (breach,) = invariants.check(windowed.scheduler)
    assert (breach.group, breach.block_ids) == (1, (3,))
    assert invariants.quarantine(windowed.scheduler, breach) == ()
    assert windowed.scheduler.kv_cache_manager.bounded[0].quarantined == {3}
