"""Each test breaks an invariant of window blocks on purpose: the check reports its number and no other."""

from __future__ import annotations

import pytest

from octavo.core import invariants
from octavo.data.request import RequestStatus


@pytest.fixture
def core(make_core):
    """A request decodes with a window of 6 tokens in blocks of 4: it holds two window blocks, and four are cached."""
    core = make_core(num_window_blocks=12, window=6, max_num_batched_tokens=8)
    core.add("runs", 21, max_tokens=20)
    for _ in range(3):
        core.step()
    assert table_of(core)[:4] == [-1] * 4
    assert len(windows_of(core).cached_ids()) == 4
    assert breaches(core) == []
    return core


def breaches(core):
    return [breach.invariant for breach in invariants.check(core.scheduler)]


def windows_of(core):
    return core.scheduler.kv_cache_manager.bounded[0]


def sequence_of(core):
    return core.scheduler.requests["runs"].sequence


def table_of(core):
    return sequence_of(core).block_tables[1]


def test_window_block_in_no_list_breaks_invariant_1(core):
    windows_of(core)._free.pop()
    assert breaches(core) == [1]


def test_window_block_listed_twice_breaks_invariant_1(core):
    windows_of(core)._free.append(windows_of(core)._free[0])
    assert breaches(core) == [1]


@pytest.mark.parametrize("change", [1, -1])
def test_wrong_window_reference_count_breaks_invariant_2(core, change):
    part = table_of(core)[-1]
    windows_of(core)._num_holders[part] += change
    assert breaches(core)[-1] == 2
    assert set(breaches(core)) == ({2} if change > 0 else {1, 2})  # an unheld block must be in a list


def test_block_mapped_to_wrong_part_breaks_invariant_5(core):
    windows = windows_of(core)
    part = table_of(core)[-1]
    windows._id_of[windows.block_of(part)] = table_of(core)[-2]
    assert 5 in breaches(core)
    assert set(breaches(core)) == {5}


def test_free_window_block_mapped_as_part_breaks_invariant_5(core):
    windows = windows_of(core)
    part = windows._free[-1]
    windows._block_of[part], windows._id_of[999] = 999, part
    assert breaches(core) == [5]


def test_cached_window_block_that_is_no_part_breaks_invariant_5(core):
    windows = windows_of(core)
    windows._separate(windows.cached_ids()[0])
    assert breaches(core) == [5]


@pytest.mark.parametrize("num_computed", [13, 29])
def test_wrong_released_window_range_breaks_invariant_3(core, num_computed):
    request = core.scheduler.requests["runs"]
    request.num_computed_tokens = num_computed
    assert 3 in breaches(core)


def test_window_release_may_lag_by_at_most_one_block(core):
    request = core.scheduler.requests["runs"]
    request.num_computed_tokens = 24  # the next block is its first one
    assert windows_of(core).first_read(24) == 4
    request.sequence.block_table.append(100)
    breach = [each for each in invariants.check(core.scheduler) if "has released" in each.message]
    assert not breach
    request.num_computed_tokens = 25
    assert windows_of(core).first_read(25) == sequence_of(core).first_held[1] + 1
    assert not [each for each in invariants.check(core.scheduler) if "has released" in each.message]
    request.num_computed_tokens = 29
    assert [each.invariant for each in invariants.check(core.scheduler) if "has released" in each.message] == [3]


def test_window_table_shorter_than_computed_tokens_breaks_invariant_3(core):
    part = table_of(core).pop()
    windows_of(core)._release([part])
    sequence_of(core).num_slots -= 4
    assert breaches(core) == [3]


def test_window_table_longer_than_block_table_breaks_invariant_3(core):
    manager = core.scheduler.kv_cache_manager
    part = windows_of(core)._free.pop()
    windows_of(core)._num_holders[part] = 1
    table_of(core).append(part)
    assert len(table_of(core)) == len(sequence_of(core).block_table) + 1
    assert manager.bounded[0].num_blocks == 12
    assert breaches(core) == [3]


def test_part_before_window_breaks_invariants_2_and_3(core):
    part = windows_of(core).cached_ids()[0]
    table_of(core)[3] = part
    assert breaches(core) == [2, 3]


def test_excess_num_slots_breaks_invariant_3(core):
    sequence_of(core).num_slots += 1
    assert breaches(core) == [3]


def test_single_window_block_is_checked_too(make_core):
    core = make_core(num_window_blocks=1, window=1, max_num_batched_tokens=4, max_num_seqs=4)
    core.add("runs", 3, max_tokens=20)
    core.step()
    assert breaches(core) == []
    core.scheduler.requests["runs"].num_computed_tokens = 3
    sequence_of(core).first_held[1] = -2
    assert 3 in breaches(core)


def test_held_window_block_without_requests_breaks_invariants_2_and_18(core):
    core.scheduler.finish_requests(["runs"], RequestStatus.FINISHED_ABORTED)
    core.scheduler.schedule()
    assert breaches(core) == []
    windows = windows_of(core)
    part = windows._free.pop()
    windows._num_holders[part] = 1
    assert set(breaches(core)) == {2, 18}
