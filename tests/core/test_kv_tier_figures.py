"""Figures of KV tiers, computed from events alone."""

from __future__ import annotations

import pytest

from octavo.data import events
from octavo.data.kv_tier_figures import KVTierCounter, KVTierFigures, shares_of
from octavo.data.kv_tiers import TierMove

NOTHING = TierMove("host", 0, 0, 0.0)


def counted(*told):
    counter = KVTierCounter({})
    for event in told:
        counter.emit(event)
    return counter.figures


def load(*moves, computing_s=8.0, resumed=False):
    num_tokens = 4 * sum(move.num_blocks for move in moves)
    return events.KVLoadEnded(3, 1.0, "r", 7, "done", num_tokens, 6.0, computing_s, "a, b", moves, resumed)


def test_tokens_and_times_of_load_are_divided_among_tiers():
    moves = TierMove("a", 1, 100, 0.5), TierMove("b", 3, 300, 1.5)
    assert list(shares_of(load(*moves))) == [(moves[0], 4, 1.5, 2.0), (moves[1], 12, 4.5, 6.0)]
    assert list(shares_of(load())) == []


def test_tiers_without_transfer_time_share_wait_by_blocks():
    moves = TierMove("a", 1, 100, 0.0), TierMove("b", 3, 300, 0.0)
    assert [share.wait_s for share in shares_of(load(*moves))] == [1.5, 4.5]


def test_load_counts_for_each_tier():
    move, other = TierMove("a", 1, 100, 0.5), TierMove("b", 3, 300, 1.5)
    figures = counted(load(move, other), load(other))
    assert figures["a"] == KVTierFigures(4, 1, 100, 0.5, wait_seconds=1.5, computing_seconds=2.0)
    assert figures["b"] == KVTierFigures(24, 6, 600, 3.0, wait_seconds=4.5 + 6.0, computing_seconds=6.0 + 8.0)


def test_load_with_unknown_computing_time_counts_no_times():
    assert counted(load(TierMove("a", 1, 100, 0.5), computing_s=0.0))["a"] == KVTierFigures(4, 1, 100, 0.5)


def test_load_of_resumed_request_counts_no_hit_tokens():
    figures = counted(load(TierMove("a", 1, 100, 0.5), resumed=True))["a"]
    assert (figures.num_hit_tokens, figures.num_loaded_blocks, figures.computing_seconds) == (0, 1, 8.0)


def test_saves_and_evictions_count_for_each_tier():
    moves = TierMove("a", 1, 100, 0.5), TierMove("b", 3, 300, 1.5)
    figures = counted(
        events.KVSaveEnded(3, 1.0, 7, 3, "done", moves),
        events.StoreBlocksEvicted(3, 1.0, "b", 5),
        events.BlockEvicted(3, 1.0, 0),
        events.HostBlockEvicted(3, 1.0, 0),
        events.HostBlockEvicted(3, 1.0, 1),
    )
    assert figures["a"] == KVTierFigures(num_saved_blocks=1, saved_bytes=100, save_seconds=0.5)
    assert figures["b"] == KVTierFigures(num_saved_blocks=3, saved_bytes=300, save_seconds=1.5, num_evicted=5)
    assert (figures["device"].num_evicted, figures["host"].num_evicted) == (1, 2)


def test_hit_tokens_are_divided_between_device_and_host():
    figures = counted(events.PrefixCacheQueried(3, 1.0, "r", 40, 32, 12, None, None))
    assert (figures["device"].num_hit_tokens, figures["host"].num_hit_tokens) == (20, 12)


def found(step, num_blocks, computing_s):
    return events.HostBlocksFound(step, 1.0, "r", num_blocks, 4 * num_blocks, computing_s)


def copied(step, num_blocks, seconds):
    return events.HostBlocksCopied(step, 2.0, NOTHING, TierMove("host", num_blocks, 100 * num_blocks, seconds))


def test_host_wait_counts_only_copies_of_found_blocks():
    """Four of the eight copied blocks were for a preempted request. For one block the computing time is unknown."""
    host = counted(found(3, 2, 5.0), found(3, 1, 7.0), found(3, 1, 0.0), copied(3, 8, 4.0))["host"]
    assert host == KVTierFigures(0, 8, 800, 4.0, wait_seconds=1.5, computing_seconds=12.0)


@pytest.mark.parametrize("lost", [[found(3, 2, 5.0)], [found(3, 2, 5.0), copied(3, 2, 1.0)]], ids=["failed", "copied"])
def test_blocks_found_in_earlier_step_do_not_count_for_copies(lost):
    alone = counted(found(4, 2, 6.0), copied(4, 2, 1.0))["host"]
    before = counted(*lost).get("host", KVTierFigures())
    after = counted(*lost, found(4, 2, 6.0), copied(4, 2, 1.0))["host"]
    assert after.computing_seconds - before.computing_seconds == alone.computing_seconds == 6.0
    assert after.wait_seconds - before.wait_seconds == alone.wait_seconds == 1.0
    after = counted(found(3, 2, 5.0), copied(4, 2, 1.0))["host"]
    assert after.computing_seconds == 0.0


def test_copies_to_host_memory_count_as_saves():
    host = counted(events.HostBlocksCopied(3, 1.0, TierMove("host", 2, 200, 0.5), NOTHING))["host"]
    assert host == KVTierFigures(num_saved_blocks=2, saved_bytes=200, save_seconds=0.5)


def test_found_blocks_of_failed_steps_are_discarded():
    counter = KVTierCounter({})
    for step in range(5):
        counter.emit(found(step, 2, 5.0))
    assert len(counter._found) == 1
