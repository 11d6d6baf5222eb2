"""Stores behind each other: order, chains that go on in the next, and one that fails."""

from __future__ import annotations

import pytest

from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore, TierTally

KEYS = [bytes([index]) * 32 for index in range(8)]
BLOCK_BYTES = 32


def blocks_of(keys):
    return [memoryview(key) for key in keys]


def buffers(count):
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(count)]


def make_store():
    return MemoryStore(GlobalKVPool(), "a", BLOCK_BYTES)


@pytest.fixture
def made():
    """A fast store, a slow one, and both behind each other."""
    fast, slow = make_store(), make_store()
    return fast, slow, TieredStore([fast, slow])


def put(store, *indices):
    keys = [KEYS[index] for index in indices]
    store.save(keys, blocks_of(keys))


def test_a_chain_goes_on_in_the_next_store_and_back(made):
    fast, slow, tiers = made
    put(fast, 0, 1, 4)
    put(slow, 2, 3, 5)
    assert tiers.num_matched(KEYS) == 6
    found = buffers(8)
    assert tiers.load(KEYS, found) == 6
    assert found[:6] == blocks_of(KEYS[:6])
    assert tiers.lacks(KEYS[:2]) == set(KEYS[:2])  # the slow one has them not
    tiers.close()


def test_the_faster_store_is_asked_first(made):
    fast, slow, tiers = made
    put(fast, 0)
    put(slow, 0)
    slow.load = lambda *_: pytest.fail("the slow store was asked")
    assert tiers.load(KEYS[:1], buffers(1)) == 1
    tiers.close()


def test_saves_go_to_each_store_that_lacks_them(made):
    fast, slow, tiers = made
    put(fast, 0, 1)
    put(slow, 1, 2)
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3])) == 3
    assert fast.num_matched(KEYS) == slow.num_matched(KEYS) == 3
    assert tiers.save([], []) == 0
    tiers.close()


def test_a_save_counts_what_any_of_them_has_now(made):
    fast, slow, tiers = made
    fast.save = lambda keys, _: 1
    slow.save = lambda keys, _: 0
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3])) == 1
    tiers.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_does_not_hide_the_other(made, failing):
    stores, tiers = made[:2], made[2]
    put(stores[1 - failing], 0, 1)

    def fail(*_):
        raise StoreError("gone")

    for name in ("num_matched", "load", "save"):
        setattr(stores[failing], name, fail)
    assert tiers.num_matched(KEYS) == 2
    assert tiers.load(KEYS[:2], buffers(2)) == 2
    assert tiers.is_usable
    assert tiers.save(KEYS[2:3], blocks_of(KEYS[2:3])) == 1
    assert stores[1 - failing].num_matched(KEYS) == 3
    assert "gone" in tiers.tiers[failing].stats().error
    assert tiers.stats().error == ""
    tiers.close()


def test_a_spoilt_block_of_the_faster_store_comes_from_the_slower_one(made):
    fast, slow, tiers = made
    put(fast, 0, 1)
    put(slow, 0, 1)
    fast.pool._nodes["a"][KEYS[1]].kv_data = b"spoilt"
    found = buffers(2)
    assert tiers.load(KEYS[:2], found) == 2
    assert found == blocks_of(KEYS[:2])
    assert tiers.lacks(KEYS[:2]) == {KEYS[1]}  # it is saved there again when it is offered
    assert tiers.stats().num_corrupt == 1


def test_a_block_that_both_have_spoilt_ends_the_load(made):
    fast, slow, tiers = made
    for store in (fast, slow):
        put(store, 0, 1)
        store.pool._nodes["a"][KEYS[1]].kv_data = b"spoilt"
    assert tiers.load(KEYS[:2], buffers(2)) == 1
    assert tiers.num_matched(KEYS[:2]) == 1
    tiers.close()


def test_who_gave_and_who_took_what_is_told_in_the_order_of_the_first_blocks(made):
    fast, slow, tiers = made
    fast.name, slow.name = "fast", "slow"
    tiers = TieredStore([fast, slow])
    put(fast, 0, 3)
    put(slow, 1, 2, 4)
    tally = TierTally()
    assert tiers.load(KEYS[:2], buffers(2), tally) == 2
    assert tiers.load(KEYS[2:6], buffers(4), tally) == 3  # of the same transfer, the next piece
    moves = tally.moves()
    assert [move[:3] for move in moves] == [("fast", 2, 2 * BLOCK_BYTES), ("slow", 3, 3 * BLOCK_BYTES)]
    assert min(move.seconds for move in moves) > 0
    tally = TierTally()
    assert tiers.save(KEYS[:2], blocks_of(KEYS[:2]), tally) == 2
    assert [move[:2] for move in tally.moves()] == [("fast", 1), ("slow", 1)]
    tally = TierTally()
    tiers.save(KEYS[:2], blocks_of(KEYS[:2]), tally)
    assert tally.moves() == ()
    tiers.close()


def test_what_made_way_is_told_by_tier(made):
    fast, slow = MemoryStore(GlobalKVPool(2), "a", BLOCK_BYTES), made[1]
    fast.name = "fast"
    tiers = TieredStore([fast, slow])
    tiers.save(KEYS[:5], blocks_of(KEYS[:5]))
    assert tiers.take_evicted() == (("fast", 3),)
    assert tiers.take_evicted() == ()
    tiers.close()


def test_forgotten_is_forgotten_by_all(made):
    fast, slow, tiers = made
    put(fast, 0)
    put(slow, 0)
    tiers.forget(KEYS[:1])
    assert fast.num_matched(KEYS) == slow.num_matched(KEYS) == 0
    tiers.close()
