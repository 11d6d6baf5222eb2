"""Stores in an order of tiers: chains that continue in the next tier, and a failing tier."""

from __future__ import annotations

import pytest

from octavo.kv_transfer.group_parts import key_of_first_group
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.interface import StoreError, StoreStats
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
    """Return a fast store, a slow one, and the tiers of both."""
    fast, slow = make_store(), make_store()
    return fast, slow, TieredStore([fast, slow])


def put(store, *indices):
    keys = [KEYS[index] for index in indices]
    store.save(keys, blocks_of(keys))


def test_chain_continues_across_tiers(made):
    fast, slow, tiers = made
    put(fast, 0, 1, 4)
    put(slow, 2, 3, 5)
    assert tiers.num_matched(KEYS) == 6
    found = buffers(8)
    assert tiers.load(KEYS, found) == 6
    assert found[:6] == blocks_of(KEYS[:6])
    assert tiers.lacks(KEYS[:2]) == set(KEYS[:2])  # the slow one lacks them
    tiers.close()


def test_faster_tier_is_loaded_first(made):
    fast, slow, tiers = made
    put(fast, 0)
    put(slow, 0)
    slow.load = lambda *_: pytest.fail("the slow store was asked")
    assert tiers.load(KEYS[:1], buffers(1)) == 1
    tiers.close()


def test_save_writes_to_each_tier_that_lacks_blocks(made):
    fast, slow, tiers = made
    put(fast, 0, 1)
    put(slow, 1, 2)
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3])) == 3
    assert fast.num_matched(KEYS) == slow.num_matched(KEYS) == 3
    assert tiers.save([], []) == 0
    tiers.close()


def test_save_counts_blocks_kept_by_any_tier(made):
    fast, slow, tiers = made
    fast.save = lambda keys, _: 1
    slow.save = lambda keys, _: 0
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3])) == 1
    tiers.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_tier_does_not_hide_other_tier(made, failing):
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


def test_corrupt_block_is_loaded_from_slower_tier(made):
    fast, slow, tiers = made
    put(fast, 0, 1)
    put(slow, 0, 1)
    fast.pool._nodes["a"][KEYS[1]].kv_data = b"spoilt"
    found = buffers(2)
    assert tiers.load(KEYS[:2], found) == 2
    assert found == blocks_of(KEYS[:2])
    assert tiers.lacks(KEYS[:2]) == {KEYS[1]}  # it can be saved there again
    assert tiers.stats().num_corrupt == 1


def test_block_corrupt_in_all_tiers_ends_load(made):
    fast, slow, tiers = made
    for store in (fast, slow):
        put(store, 0, 1)
        store.pool._nodes["a"][KEYS[1]].kv_data = b"spoilt"
    assert tiers.load(KEYS[:2], buffers(2)) == 1
    assert tiers.num_matched(KEYS[:2]) == 1
    tiers.close()


def test_tally_lists_tiers_in_order_of_first_block(made):
    fast, slow, tiers = made
    fast.name, slow.name = "fast", "slow"
    tiers = TieredStore([fast, slow])
    put(fast, 0, 3)
    put(slow, 1, 2, 4)
    tally = TierTally()
    assert tiers.load(KEYS[:2], buffers(2), tally) == 2
    assert tiers.load(KEYS[2:6], buffers(4), tally) == 3  # the next piece of the same transfer
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


def test_take_evicted_reports_evictions_per_tier(made):
    fast, slow = MemoryStore(GlobalKVPool(2), "a", BLOCK_BYTES), made[1]
    fast.name = "fast"
    tiers = TieredStore([fast, slow])
    tiers.save(KEYS[:5], blocks_of(KEYS[:5]))
    assert tiers.take_evicted() == (("fast", 3),)
    assert tiers.take_evicted() == ()
    tiers.close()


def test_forget_reaches_all_tiers(made):
    fast, slow, tiers = made
    put(fast, 0)
    put(slow, 0)
    tiers.forget(KEYS[:1])
    assert fast.num_matched(KEYS) == slow.num_matched(KEYS) == 0
    tiers.close()


class Told(MemoryStore):
    """A store that records its calls."""

    def __init__(self, name="told"):
        super().__init__(GlobalKVPool(), "a", BLOCK_BYTES)
        self.name, self.calls, self.told = name, [], StoreStats(0, 0, None)

    def num_matched(self, keys):
        self.calls.append(("num_matched", list(keys)))
        return super().num_matched(keys)

    def load(self, keys, blocks):
        self.calls.append(("load", list(keys)))
        if len(keys) != len(blocks):
            raise ValueError("as many blocks as keys were expected")
        return super().load(keys, blocks)

    def save(self, keys, blocks):
        self.calls.append(("save", list(keys)))
        return super().save(keys, blocks)

    def stats(self):
        return self.told


def test_single_tier_is_queried_once():
    store = Told()
    tiers = TieredStore([store])
    put(store, 0, 1)
    store.calls.clear()
    assert tiers.num_matched(KEYS) == 2
    assert tiers.load(KEYS[:2], buffers(2)) == 2
    assert store.calls == [("num_matched", KEYS), ("load", KEYS[:2])]
    assert tiers.num_matched([]) == 0
    assert len(store.calls) == 2


def test_slower_tier_is_queried_only_for_missing_blocks():
    fast, slow = Told("fast"), Told("slow")
    tiers = TieredStore([fast, slow])
    put(fast, 0, 3)
    put(slow, 1, 2)
    fast.calls.clear(), slow.calls.clear()
    assert tiers.num_matched(KEYS[:4]) == 4
    assert fast.calls == [("num_matched", KEYS[:4]), ("num_matched", KEYS[3:4])]
    assert slow.calls == [("num_matched", KEYS[1:4])]
    fast.calls.clear(), slow.calls.clear()
    assert tiers.load(KEYS[:4], buffers(4)) == 4
    assert fast.calls == [
        ("num_matched", KEYS[:4]), ("load", KEYS[:1]), ("num_matched", KEYS[1:4]),
        ("num_matched", KEYS[3:4]), ("load", KEYS[3:4]),
    ]  # fmt: skip
    assert slow.calls == [("load", KEYS[1:4])]


def test_unusable_tier_gets_no_save():
    fast, slow = Told("fast"), Told("slow")
    tiers = TieredStore([fast, slow])
    tiers.tiers[0].close()
    assert tiers.save(KEYS[:2], blocks_of(KEYS[:2])) == 2
    assert (fast.calls, slow.calls) == ([], [("save", KEYS[:2])])
    tiers.tiers[1].close()
    assert tiers.save(KEYS[:2], blocks_of(KEYS[:2])) == 0


def test_save_writes_only_missing_blocks_per_tier():
    fast, slow = Told("fast"), Told("slow")
    tiers = TieredStore([fast, slow])
    put(fast, 0, 2)
    fast.calls.clear()
    tally = TierTally()
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3]), tally) == 3
    assert (fast.calls, slow.calls) == ([("save", KEYS[1:2])], [("save", KEYS[:3])])
    assert [move[:3] for move in tally.moves()] == [("fast", 1, BLOCK_BYTES), ("slow", 3, 3 * BLOCK_BYTES)]
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3])) == 3
    assert (len(fast.calls), len(slow.calls)) == (1, 1)


def test_save_counts_only_accepted_blocks():
    fast, slow = Told("fast"), Told("slow")
    tiers, tally = TieredStore([fast, slow]), TierTally()
    fast.save = lambda keys, _: 1
    slow.save = lambda keys, _: 2
    assert tiers.save(KEYS[:3], blocks_of(KEYS[:3]), tally) == 2
    assert [move[:3] for move in tally.moves()] == [("fast", 1, BLOCK_BYTES), ("slow", 2, 2 * BLOCK_BYTES)]


def test_tally_sums_moves_of_one_tier():
    store, tally = GuardedStore.of(Told()), TierTally()
    tally.add(store, 2, 20, 0.5)
    tally.add(store, 0, 99, 99.0)
    tally.add(store, 3, 30, 0.25)
    assert tally.moves() == (("told", 5, 50, 0.75),)


def test_stats_sum_all_tiers():
    fast, slow = Told("fast"), Told("slow")
    tiers = TieredStore([fast, slow])
    fast.told, slow.told = StoreStats(1, 2, 3, 4, 5, 6, "a"), StoreStats(10, 20, 30, 40, 50, 60, "b")
    assert tiers.stats() == StoreStats(11, 22, 33, 44, 55, 66, "")
    slow.told = StoreStats(10, 20, None)
    assert tiers.stats().max_bytes is None
    assert tiers.figures == {"fast": tiers.tiers[0].figures, "slow": tiers.tiers[1].figures}
    assert (tiers.name, tiers.block_bytes) == ("fast, slow", BLOCK_BYTES)
    tiers.tiers[0].close()
    assert (tiers.is_usable, tiers.stats().error) == (True, "")
    tiers.tiers[1].close()
    assert (tiers.is_usable, tiers.stats().error) == (False, "fast: a; slow: ")


def test_open_opens_each_tier():
    opened = []
    stores = [GuardedStore(name, BLOCK_BYTES, lambda: (opened.append(None), Told())[1]) for name in "ab"]
    tiers = TieredStore(stores)
    assert tiers.tiers == stores
    tiers.open()
    assert len(opened) == 2


def test_first_group_is_saved_only_in_tiers_that_keep_parts():
    whole_only, both = Told("whole"), Told("both")
    tiers = TieredStore([GuardedStore.of(whole_only, keeps_parts=False), both])
    names = [key_of_first_group(key) for key in KEYS]
    assert tiers.lacks(KEYS[:3], only_first_group=True) == set(KEYS[:3])
    assert tiers.save(KEYS[:2], blocks_of(KEYS[:2]), only_first_group=True) == 2
    assert (whole_only.calls, both.calls) == ([], [("save", names[:2])])
    assert both.pool.lacks(names[:3]) == {names[2]}
    assert tiers.lacks(KEYS[:3]) == set(KEYS[:3])
    assert tiers.num_matched(KEYS, only_first_group=True) == 2
    assert tiers.num_matched(KEYS) == 0
    put(both, 2)
    assert tiers.lacks(KEYS[:4], only_first_group=True) == {KEYS[3]}, "a whole block has its first group, too"
    found = buffers(3)
    assert tiers.load(KEYS[:3], found, only_first_group=True) == 2
    assert found[:2] == blocks_of(KEYS[:2])
    assert not [call for call in whole_only.calls if call[1] and call[1][0] in names]
