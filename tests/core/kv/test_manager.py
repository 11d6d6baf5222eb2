"""The KV cache manager: blocks that it keeps, their hashes, and its memory of evicted blocks."""

from __future__ import annotations

import pytest

from octavo.core.kv.manager import KVCacheManager
from octavo.data.kv_groups import KVGroupSpec, SlidingWindow
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(request_id, tokens, **options):
    return Request(request_id, tokens, SamplingParams(), **options)


def compute(manager, request, num_tokens=None):
    """Look up, allocate and compute `num_tokens` tokens (default: all) of a request; return its block table."""
    computed = manager.get_computed_blocks(request)
    count = (num_tokens or request.num_tokens) - computed.num_tokens
    assert manager.allocate_slots(request, count, computed) is not None
    request.num_computed_tokens = computed.num_tokens + count
    manager.commit(request)
    return request.sequence.block_table


def test_default_manager_has_prefix_cache_and_no_host_blocks():
    manager = KVCacheManager(8, 4)
    assert (manager.host.num_blocks, manager.capacity_tokens) == (0, 32)
    assert (manager.prefix_cache.is_enabled, manager.prefix_cache.cache_decoded_blocks) == (True, True)


@pytest.mark.parametrize(("num_blocks", "capacity"), [(8, 1024), (256, 1024), (300, 1200)])
def test_history_capacity_is_four_times_cache_and_at_least_1024(num_blocks, capacity):
    history = KVCacheManager(num_blocks, 4).prefix_cache.history
    for index in range(capacity + 1):
        history.add(0, (index,), b"%d" % index, None, ())
    assert history.why_missed(0, [-1], b"0", b"other", ()).reason == "never seen"
    assert history.why_missed(0, [-1], b"1", b"other", ()).reason == "evicted"


# --- swapped ----------------------------------------------------------------------------------------------------------


def swapped(manager, tokens, num_computed):
    """Return a request with `num_computed` tokens in host memory."""
    request = make_request("swapped", tokens)
    manager.allocate_slots(request, num_computed)
    request.num_computed_tokens = num_computed
    assert manager.swap_out(request)
    manager.release(request)
    manager.take_copies()
    request.num_computed_tokens = 0
    request.num_preemptions = 1
    return request


@pytest.mark.parametrize(
    ("cached", "num_tokens", "num_blocks", "num_host_blocks"),
    [(0, 9, 0, 3), (4, 9, 1, 2), (8, 9, 2, 1), (12, 12, 3, 0)],
)
def test_resumed_request_uses_cached_blocks_before_saved_ones(cached, num_tokens, num_blocks, num_host_blocks):
    manager = KVCacheManager(16, 4, num_host_blocks=4)
    request = swapped(manager, list(range(14)), 9)
    host_blocks = manager.saved_blocks()["swapped"]
    if cached:
        compute(manager, make_request("other", [*range(cached), 99]))
    found = manager.get_computed_blocks(request)
    assert (found.num_tokens, len(found.blocks)) == (num_tokens, num_blocks)
    assert found.host_blocks == host_blocks[3 - num_host_blocks :]
    table = compute(manager, request)
    copies = manager.take_copies()
    targets = table[num_blocks : num_blocks + num_host_blocks]
    assert copies.swap_in == [(0, *pair) for pair in zip(found.host_blocks, targets, strict=True)]
    assert "swapped" not in manager.saved_blocks()
    assert manager.host.num_free_blocks == 4
    assert request.sequence.num_cached_tokens == 0  # its own KV was found, not that of another prompt


def test_partial_block_copy_is_preferred_to_shorter_saved_kv():
    manager = KVCacheManager(16, 4, num_host_blocks=4)
    request = swapped(manager, list(range(11)), 8)
    compute(manager, make_request("other", list(range(11))))
    found = manager.get_computed_blocks(request)
    assert (found.num_tokens, found.host_blocks) == (10, [])
    assert found.source is not None


# --- tables -----------------------------------------------------------------------------------------------------------


def test_allocate_slots_adds_blocks_only_if_table_is_full():
    manager = KVCacheManager(6, 4)
    request = make_request("a", list(range(20)))
    assert manager.allocate_slots(request, 4) == [0]
    request.num_computed_tokens = 4
    assert manager.allocate_slots(request, 1) == [1]
    assert manager.allocate_slots(request, 4) == []
    assert manager.allocate_slots(request, 5) == [2]
    assert manager.allocate_slots(request, 21) is None
    assert request.sequence.block_table == [0, 1, 2]
    assert manager.allocate_slots(request, 20) == [3, 4, 5]


def test_allocation_covers_larger_of_tokens_and_reservation():
    manager = KVCacheManager(6, 4)
    assert manager.allocate_slots(make_request("a", [1, 2, 3]), 3, num_reserved_tokens=9) == [0, 1, 2]
    assert manager.allocate_slots(make_request("b", [1, 2, 3, 4, 5]), 5, num_reserved_tokens=4) == [3, 4]


def test_can_hold_counts_free_blocks_and_hit_blocks():
    manager = KVCacheManager(6, 4)
    holder = make_request("a", list(range(9)))
    compute(manager, holder)
    found = manager.get_computed_blocks(make_request("b", list(range(21))))
    assert len(found.blocks) == 2
    assert manager.can_hold(20, found, 0)  # 2 of 5 blocks are held, 3 are free
    assert not manager.can_hold(21, found, 0)
    assert manager.can_hold(16, found, 1)
    assert not manager.can_hold(17, found, 1)
    manager.free(holder)
    assert manager.can_hold(24, found, 0)
    assert not manager.can_hold(25, found, 0)


def test_pinned_blocks_are_released_once():
    manager = KVCacheManager(4, 4)
    request = make_request("a", list(range(8)))
    table = list(compute(manager, request))
    manager.pin(7, [table])
    assert (manager.num_transfers, manager.pinned_ids(0)) == (1, table)
    manager.free(request)
    assert manager.pool.num_free_blocks == 2
    for _ in range(2):
        manager.unpin(7)
    assert (manager.num_transfers, manager.pool.num_free_blocks) == (0, 4)
    assert [block.block_id for block in manager.pool.cached_blocks()] == table[::-1]  # the tail is evicted first


def test_unpin_releases_window_parts_tail_first():
    manager = KVCacheManager(4, 4, bounded_groups=[KVGroupSpec(SlidingWindow(6), 4)], max_step_tokens=8)
    request = make_request("a", list(range(8)))
    manager.add_tables(request)
    table = list(compute(manager, request))
    parts = list(request.sequence.block_tables[1])
    manager.pin(7, [table, parts])
    assert manager.pinned_ids(1) == parts
    manager.free(request)
    assert manager.bounded[0].cached_ids() == []
    manager.unpin(7)
    assert manager.bounded[0].cached_ids() == parts[::-1]


def test_new_weights_clear_caches_only_without_held_blocks():
    manager = KVCacheManager(8, 4, num_host_blocks=4)
    request = swapped(manager, list(range(9)), 8)
    holder = make_request("holder", [1, 2, 3])
    compute(manager, holder)
    assert manager.advance_weights_epoch() is False
    assert "swapped" in manager.saved_blocks()
    assert manager.num_tracked_requests == 3
    manager.release(holder)
    assert manager.advance_weights_epoch() is True
    assert manager.host.num_free_blocks == 4
    assert manager.num_tracked_requests == 0
    assert manager.get_computed_blocks(request).num_tokens == 0


def test_prefix_cache_reset_is_refused_while_blocks_are_held():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(9)))
    compute(manager, request)
    assert manager.reset_prefix_cache() is False
    manager.free(request)
    assert manager.pool.num_cached_blocks == 2
    assert manager.reset_prefix_cache() is True
    assert manager.pool.num_cached_blocks == 0


@pytest.mark.parametrize(("num_computed", "num_blocks"), [(1, 1), (4, 1), (5, 2)])
def test_swap_out_saves_only_computed_blocks(num_computed, num_blocks):
    manager = KVCacheManager(8, 4, num_host_blocks=2)
    request = make_request("a", list(range(12)))
    manager.allocate_slots(request, 12)
    assert manager.swap_out(request) is False  # nothing is computed
    request.num_computed_tokens = 12
    assert manager.swap_out(request) is False  # no room for three
    assert manager.host.num_free_blocks == 2
    request.num_computed_tokens = num_computed
    assert manager.swap_out(request) is True
    pairs = zip(range(num_blocks), manager.saved_blocks()["a"], strict=True)
    assert manager.take_copies().swap_out == [(0, *pair) for pair in pairs]
    assert len(manager.saved_blocks()["a"]) == num_blocks
    manager.release(request)
    manager.drop_saved("a")
    manager.drop_saved("a")
    assert manager.host.num_free_blocks == 2


# --- copies and commits -----------------------------------------------------------------------------------------------


def test_copy_target_is_first_new_block():
    manager = KVCacheManager(8, 4)
    table = compute(manager, make_request("a", [1, 2, 3]))
    again = make_request("b", [1, 2, 3])
    new = manager.allocate_slots(again, 1, manager.get_computed_blocks(again), num_reserved_tokens=12)
    assert len(new) == 3
    assert manager.take_copies().block_copies == [(0, table[0], new[0])]


def test_copy_source_reused_as_target_is_not_copied():
    manager = KVCacheManager(2, 4)
    first = make_request("a", [1, 2, 3, 4])
    compute(manager, first)
    manager.free(first)
    again = make_request("b", [1, 2, 3, 4])
    found = manager.get_computed_blocks(again)
    assert found.source is not None
    manager.pool.take(1)  # the only other free block
    assert manager.allocate_slots(again, 1, found) == [0]
    assert not manager.take_copies()


def test_copy_source_reused_as_other_new_block_is_copied_first():
    manager = KVCacheManager(2, 4)
    for name, expected, copies in (("a", [0, 1], []), ("b", [1, 0], [(0, 0, 1)])):
        request = make_request(name, [1, 2, 3, 4])
        found = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 4 - found.num_tokens, found, num_reserved_tokens=8) == expected
        assert manager.take_copies().block_copies == copies
        request.num_computed_tokens = 4
        manager.commit(request)
        manager.free(request)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_next_commit_is_next_position_that_needs_commit(enable_prefix_caching):
    manager = KVCacheManager(8, 4, enable_prefix_caching=enable_prefix_caching)
    request = make_request("a", list(range(9)))
    manager.allocate_slots(request, 20)
    request.sequence.token_ids += range(50, 60)
    expected = {4: 0, 8: 0, 9: 12, 11: 12, 12: 16} if enable_prefix_caching else {4: 8, 8: 12, 9: 12, 11: 12, 12: 16}
    for num_computed, next_commit in expected.items():
        request.num_computed_tokens = num_computed
        manager.commit(request)
        assert request.sequence.next_commit == next_commit
    manager.release(request)
    assert request.sequence.next_commit == 0
    assert manager.pool.num_cached_blocks == (3 if enable_prefix_caching else 0)


def test_resumed_request_commits_its_blocks_again():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(12)))
    compute(manager, request, 9)
    manager.release(request)
    request.num_computed_tokens = 0
    assert manager.reset_prefix_cache()
    table = compute(manager, request)
    assert manager.pool.num_cached_blocks == 3
    assert [block.block_id for block in manager.get_computed_blocks(make_request("b", list(range(13)))).blocks] == table


def test_new_weights_change_block_hashes():
    manager, request = KVCacheManager(4, 4), Request("a", list(range(8)), SamplingParams())
    manager.update_block_hashes(request)
    before = list(request.block_hashes)
    assert manager.advance_weights_epoch()
    manager.update_block_hashes(request)
    assert len(request.block_hashes) == len(before) == 2
    assert not set(before) & set(request.block_hashes)


def test_max_step_tokens_defaults_to_one():
    manager = KVCacheManager(16, 4, bounded_groups=[KVGroupSpec(SlidingWindow(6), 9)])
    request = make_request("a", list(range(40)))
    manager.add_tables(request)
    manager.allocate_slots(request, 1, num_reserved_tokens=40)
    assert request.sequence.block_tables[1] == [0, 1, 2]  # a row reads six positions in up to three blocks


def test_bounded_usage_is_that_of_fullest_bounded_group():
    groups = [KVGroupSpec(SlidingWindow(40), 16), KVGroupSpec(SlidingWindow(40), 8), KVGroupSpec(SlidingWindow(40), 9)]
    assert KVCacheManager(16, 4).bounded_usage == 0.0
    manager = KVCacheManager(16, 4, bounded_groups=groups)
    request = make_request("a", list(range(8)))
    manager.add_tables(request)
    manager.allocate_slots(request, 8)
    assert manager.bounded_usage == 0.25


def test_requests_with_grown_tables_are_tracked_until_release():
    manager = KVCacheManager(16, 4)
    request = make_request("a", list(range(8)))
    manager.allocate_slots(request, 8)
    assert manager.grown == {"a"}
    manager.release(request)
    assert manager.grown == set()
