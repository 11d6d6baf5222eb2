"""The block pool alone: free, cached and held blocks, eviction and lookups."""

from __future__ import annotations

import pytest

from octavo.core.kv.block_pool import BlockPool
from octavo.data.snapshot import BlockState

KEYS = ("salt:a",)


def filled(pool, name, token, parent=None, extra_keys=()):
    """Take a block and make its content findable under `name`; return the block."""
    [block] = pool.take(1)
    assert pool.register(block, name, (token,), parent, extra_keys) is block
    return block


def states(pool):
    return [BlockState(state).name for state in pool.states()]


def test_pool_reports_state_of_each_block():
    pool = BlockPool(5)
    _, cached, owned, shared, broken = blocks = [filled(pool, b"%d" % index, index) for index in range(5)]
    pool.touch([shared])
    pool.release([cached])
    pool.evict(cached)
    cached = filled(pool, b"again", 9)
    pool.release([cached, blocks[0]])
    pool.evict(blocks[0])
    pool.quarantine(broken)
    assert states(pool) == ["FREE", "CACHED", "OWNED", "SHARED", "QUARANTINED"]
    assert pool.blocks[2] is owned
    pool.touch([shared])
    assert states(pool)[3] == "SHARED"
    assert (pool.num_blocks, pool.num_usable_blocks, pool.num_free_blocks, pool.num_cached_blocks) == (5, 4, 2, 3)
    assert pool.usage == 1 - 2 / 5


def test_reallocated_block_gets_new_link():
    pool = BlockPool(1)
    [block] = pool.take(1)
    links = {block.link}
    for _ in range(3):
        pool.release([block])
        pool.take(1)
        links.add(block.link)
    assert len(links) == 4
    assert {block_id for block_id, _ in links} == {0}


def test_hash_lookup_requires_equal_tokens_parent_and_keys():
    pool = BlockPool(2)
    parent = filled(pool, b"p", 1)
    block = filled(pool, b"b", 2, parent.link, KEYS)
    assert pool.find(b"b", (2,), parent.link, KEYS) is block
    assert pool.find(b"b", (3,), parent.link, KEYS) is None
    assert pool.find(b"b", (2,), None, KEYS) is None
    assert pool.find(b"b", (2,), parent.link) is None
    assert pool.find(b"other", (2,), parent.link, KEYS) is None
    assert pool.indexed(b"b") is block
    assert pool.indexed(None) is None


def test_duplicate_block_remains_private_and_records_canonical_block():
    pool = BlockPool(4)
    first = filled(pool, b"a", 1)
    second, third = pool.take(2)
    assert pool.register(second, b"a", (1,), None) is first
    assert second.hash is None
    assert second.canonical == first.link
    assert pool.register(third, b"a", (2,), None) is third  # equal hashes with different tokens: the first block stays
    assert third.hash is None
    assert third.canonical is None
    pool.release([second])
    [again] = pool.take(1)
    assert again is second
    assert again.canonical is None


def orphan(pool):
    """Return a held, findable block; its parent was evicted."""
    parent = filled(pool, b"p", 1)
    child = filled(pool, b"c", 2, parent.link)
    pool.release([parent])
    taken = pool.take(pool.num_free_blocks)
    assert parent in taken
    pool.release([block for block in taken if block is not parent])
    return child


def test_held_orphan_block_loses_its_hash_to_reachable_duplicate():
    pool = BlockPool(4)
    child = orphan(pool)
    fresh = filled(pool, b"new parent", 1)
    [equal] = pool.take(1)
    assert pool.register(equal, b"c", (2,), fresh.link) is equal
    assert pool.find(b"c", (2,), fresh.link) is equal
    assert (child.hash, child.token_ids, child.parent, child.ref_count) == (None, (), None, 1)
    assert pool.num_free_blocks == 0
    pool.release([child])
    assert pool.free_list() == [child.block_id]


def test_cached_orphan_block_is_freed_for_reachable_duplicate():
    pool = BlockPool(4)
    child = orphan(pool)
    fresh = filled(pool, b"new parent", 1)
    [equal] = pool.take(1)
    pool.release([child])
    assert pool.cached_blocks() == [child]
    assert pool.register(equal, b"c", (2,), fresh.link) is equal
    assert pool.cached_blocks() == []
    assert pool.free_list() == [child.block_id]
    assert pool.num_cached_blocks == 2


def test_reachable_block_keeps_its_hash_against_duplicate():
    pool = BlockPool(3)
    parent = filled(pool, b"p", 1)
    child = filled(pool, b"c", 2, parent.link)
    [equal] = pool.take(1)
    assert pool.register(equal, b"c", (2,), parent.link) is child
    assert child.hash == b"c"


def test_renew_affects_only_cached_block_of_same_generation():
    pool = BlockPool(3)
    first, second, third = (filled(pool, b"%d" % index, index) for index in range(3))
    link = first.link
    pool.release([first, second])
    pool.renew(third.link)  # no effect, because it is held
    pool.renew((first.block_id, first.generation - 1))
    assert pool.cached_blocks() == [first, second]
    pool.renew(link)
    assert pool.cached_blocks() == [second, first]


def test_release_of_duplicate_renews_canonical_block():
    pool = BlockPool(3)
    first, other = filled(pool, b"a", 1), filled(pool, b"b", 2)
    [private] = pool.take(1)
    pool.register(private, b"a", (1,), None)
    pool.release([first, other])
    pool.release([private])
    assert pool.cached_blocks() == [other, first]
    assert pool.free_list() == [private.block_id]


def test_evict_frees_block_and_calls_callback():
    told = []
    pool = BlockPool(2, lambda block: told.append((block.block_id, block.hash)))
    block = filled(pool, b"a", 1)
    pool.release([block])
    pool.evict(block)
    assert told == [(block.block_id, b"a")]
    assert pool.find(b"a", (1,), None) is None
    assert (block.hash, block.token_ids, block.parent, block.extra_keys) == (None, (), None, ())
    assert block.block_id in pool.free_list()
    assert pool.cached_blocks() == []
    assert pool.num_free_blocks == 2


def test_reset_frees_cached_blocks_if_only_quarantined_ones_are_held():
    pool = BlockPool(4)
    kept, *blocks = (filled(pool, b"%d" % index, index) for index in range(4))
    pool.release(blocks[:2])
    pool.quarantine(blocks[2])
    assert not pool.reset()
    assert len(pool.cached_blocks()) == 2
    pool.release([kept])
    assert pool.reset()
    assert sorted(pool.free_list()) == sorted(block.block_id for block in (kept, *blocks[:2]))
    assert pool.num_cached_blocks == 0
    assert pool.cached_blocks() == []


@pytest.mark.parametrize("place", ["free", "cached", "held", "held without content"])
def test_quarantined_block_is_never_allocated_again(place):
    pool = BlockPool(3)
    [block] = pool.take(1)
    if place in {"cached", "held"}:
        pool.register(block, b"a", (1,), None)
    if place in {"cached", "free"}:
        pool.release([block])
    pool.quarantine(block)
    assert pool.quarantined == {block.block_id}
    assert block.block_id not in pool.free_block_ids()
    assert (block.hash, pool.num_cached_blocks, pool.indexed(b"a")) == (None, 0, None)
    assert (block.token_ids, block.parent, block.extra_keys) == ((), None, ())
    if block.ref_count:
        pool.release([block])
    assert pool.num_free_blocks == 2
    assert block not in pool.take(2)
    assert pool.num_usable_blocks == 2


def test_repeated_quarantine_keeps_replacement_indexed():
    pool = BlockPool(2)
    block = filled(pool, b"a", 1)
    pool.quarantine(block)
    fresh = filled(pool, b"a", 1)
    pool.quarantine(block)
    assert pool.indexed(b"a") is fresh


def test_forget_callback_runs_once_for_each_forgotten_block():
    forgotten = []
    pool = BlockPool(3, on_forget=lambda block: forgotten.append((block.block_id, block.hash)))
    taken, orphan, broken = filled(pool, b"a", 1), filled(pool, b"b", 2), filled(pool, b"c", 3)
    pool.release([taken])
    pool.take(1)
    orphan.parent = (9, 9)
    pool.release([orphan])
    pool.quarantine(broken)
    fresh = pool.register(pool.blocks[taken.block_id], b"b", (2,), None)
    assert forgotten == [(taken.block_id, None), (broken.block_id, None), (orphan.block_id, None)]
    pool.release([fresh])
    pool.evict(fresh)
    assert forgotten[3:] == [(fresh.block_id, None)]


def test_findable_block_is_the_registered_block_itself():
    pool = BlockPool(3)
    block = filled(pool, b"a", 1)
    assert pool.findable(block.block_id) is block
    pool.release([block])
    assert pool.findable(block.block_id) is block
    pool.evict(block)
    assert pool.findable(block.block_id) is None


def test_findable_block_of_duplicate_is_its_canonical_block():
    pool = BlockPool(3)
    original = filled(pool, b"a", 1)
    [double] = pool.take(1)
    assert pool.register(double, b"a", (1,), None) is original
    assert pool.findable(double.block_id) is original
    pool.release([original])
    assert pool.findable(double.block_id) is original
    pool.evict(original)
    assert pool.findable(double.block_id) is None


def test_canonical_block_of_older_generation_is_not_findable():
    pool = BlockPool(2)
    original = filled(pool, b"a", 1)
    [double] = pool.take(1)
    pool.register(double, b"a", (1,), None)
    pool.release([original])
    pool.evict(original)
    other = filled(pool, b"b", 2)
    assert other is original
    assert pool.findable(other.block_id) is other
    assert pool.findable(double.block_id) is None


def test_block_whose_hash_belongs_to_other_content_is_not_findable():
    pool = BlockPool(2)
    filled(pool, b"a", 1)
    [colliding] = pool.take(1)
    assert pool.register(colliding, b"a", (2,), None) is colliding
    assert pool.findable(colliding.block_id) is None
