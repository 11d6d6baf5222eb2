"""The pool of host blocks alone: owners, lookups, eviction, and blocks that may not be overwritten yet."""

from __future__ import annotations

import pytest

from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.host_block_pool import HostBlockPool

KEYS = ("salt:a",)


def content(token, parent=None, extra_keys=()):
    """Return a device block with this content and a hash of one byte."""
    pool = BlockPool(1)
    [block] = pool.take(1)
    pool.register(block, bytes([token]), (token,), parent, extra_keys, ("name of", token))
    return block


def kept(pool, *tokens):
    """Keep content of these tokens in host memory; return the host blocks."""
    return [pool.keep(content(token)) for token in tokens]


def ids(pool):
    return [block.block_id for block in pool.cached_blocks()]


def test_host_blocks_are_taken_and_released():
    pool = HostBlockPool(3)
    assert (pool.num_blocks, pool.num_free_blocks) == (3, 3)
    assert pool.take(4) is None
    assert pool.take(2) == [0, 1]
    assert pool.num_free_blocks == 1
    pool.release([0])
    assert pool.take(2) == [0, 2]
    assert pool.take(0) == []
    assert pool.free_block_ids() == []


def test_host_lookup_requires_equal_tokens_parent_and_keys():
    pool = HostBlockPool(2)
    parent = ("parent", 1)
    block_id = pool.keep(content(2, parent, KEYS))
    found = pool.find(b"\2", (2,), parent, KEYS)
    assert (found.block_id, found.name) == (block_id, ("name of", 2))
    assert pool.indexed(b"\2") is found
    assert pool.find(b"\2", (3,), parent, KEYS) is None
    assert pool.find(b"\2", (2,), None, KEYS) is None
    assert pool.find(b"\2", (2,), parent) is None
    assert pool.find(b"\3", (2,), parent, KEYS) is None
    assert pool.has_name(("name of", 2))
    assert not pool.has_name(parent)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (1, 2)


def test_keep_evicts_least_recently_used_host_block_and_notifies():
    told = []
    pool = HostBlockPool(2, lambda _kind, block_id: told.append(block_id))
    assert kept(pool, 1, 2) == [0, 1]
    assert kept(pool, 1) == [None]  # it is kept already; this counts as a use
    assert ids(pool) == [1, 0]
    assert kept(pool, 3) == [1]
    assert told == [1]
    assert pool.indexed(b"\2") is None
    assert not pool.has_name(("name of", 2))
    assert ids(pool) == [0, 1]
    assert pool.num_cached_blocks == 2


@pytest.mark.parametrize("is_lent", [False, True])
def test_hash_collision_replaces_host_block_unless_lent(is_lent):
    told = []
    pool = HostBlockPool(2, lambda _kind, block_id: told.append(block_id))
    kept(pool, 1, 2)
    other = content(1)
    other.name = ("other", 1)
    if is_lent:
        pool.lend([0])
    assert pool.keep(other) == (None if is_lent else 0)
    pool.end_lending()
    assert pool.indexed(b"\1").name == (("name of", 1) if is_lent else ("other", 1))
    assert pool.has_name(("name of", 1)) is is_lent
    assert ids(pool) == [1, 0]
    assert told == []


def test_take_evicts_cached_content_but_keep_evicts_no_taken_block():
    told = []
    pool = HostBlockPool(3, lambda _kind, block_id: told.append(block_id))
    kept(pool, 1, 2)
    assert pool.take(3) == [2, 0, 1]
    assert told == [0, 1]
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 0)
    assert kept(pool, 3) == [None]
    pool.release([0])
    assert kept(pool, 3) == [0]
    assert kept(pool, 4) == [0]


@pytest.mark.parametrize("count", [2, 3])
def test_lent_host_block_is_found_but_not_evicted(count):
    pool = HostBlockPool(3)
    kept(pool, 1, 2, 3)
    pool.lend([1])
    pool.lend([1])
    assert pool.num_free_blocks == 2
    assert (pool.take(count) is None) == (count == 3)
    assert pool.find(b"\2", (2,), None).block_id == 1
    assert pool.keep(content(2)) is None
    pool.drop(1)
    assert pool.indexed(b"\2") is not None
    pool.end_lending()
    assert pool.lent == {}
    assert 1 in ids(pool)


def test_end_lending_returns_chain_to_cache_tail_first():
    pool = HostBlockPool(4)
    kept(pool, 1, 2, 3)
    saved = pool.take(1)
    pool.lend([0, 1])
    pool.lend(saved)
    assert pool.num_free_blocks == 1
    pool.end_lending()
    assert ids(pool) == [2, 1, 0]
    assert pool.free_block_ids() == saved == [3]


def test_drop_frees_only_cached_host_blocks():
    pool = HostBlockPool(3)
    kept(pool, 1, 2)
    [saved] = pool.take(1)
    for block_id in (0, 0, saved, 7):
        pool.drop(block_id)
    assert pool.free_block_ids() == [0]
    assert ids(pool) == [1]
    assert (pool.indexed(b"\1"), pool.has_name(("name of", 1))) == (None, False)
    pool.reset()
    assert (sorted(pool.free_block_ids()), pool.num_cached_blocks, ids(pool)) == ([0, 1], 0, [])
    pool.reset()


def test_name_is_followed_while_any_child_is_cached():
    pool = HostBlockPool(4)
    before = ("name of", 1)
    first, second = pool.keep(content(2, before)), pool.keep(content(3, before))
    assert [pool.is_followed(name) for name in (before, ("name of", 2))] == [True, False]
    pool.drop(first)
    assert pool.is_followed(before)
    pool.drop(second)
    assert not pool.is_followed(before)
    pool.keep(content(4, before))
    assert pool.is_followed(before)
