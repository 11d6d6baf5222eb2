"""Sequences of blocks with and without their window parts: lookups, loads and saves."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

from octavo.data.kv_groups import SlidingWindow
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.kv_transfer.connector import StoreConnector
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.group_parts import find_blocks, key_of_first_group, load, num_usable, save
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore, TierTally

KEYS = [bytes([number]) * 32 for number in range(8)]
BLOCK_BYTES, PART_BYTES = 24, 8  # of a block, and of a block without its window part
SIZE, WINDOW = 4, 9


def look_up(store, keys, *where):
    """Return the number of leading blocks of a store after which a request can resume."""
    return num_usable(find_blocks(store, keys, *where), *where)


def content_of(number, num_bytes=BLOCK_BYTES):
    return memoryview(bytes([number + 1] * PART_BYTES + [number + 100] * (BLOCK_BYTES - PART_BYTES))[:num_bytes])


def put(store, whole=(), in_part=(), part_bytes=PART_BYTES):
    """Make a store keep blocks of both kinds. whole, in_part: their numbers."""
    store.save([KEYS[number] for number in whole], [content_of(number) for number in whole])
    parts = [key_of_first_group(KEYS[number]) for number in in_part]
    if parts:
        store.save(parts, [content_of(number, part_bytes) for number in in_part])


def memory(**kinds):
    store = MemoryStore(GlobalKVPool(), "a", BLOCK_BYTES)
    put(store, **kinds)
    return store


def loaded(store, needs_window, part_bytes=PART_BYTES, tally=None):
    """Load as many blocks. Return the content of each; bytes that were not written are zero."""
    blocks = [memoryview(bytearray(BLOCK_BYTES)) for _ in needs_window]
    tally = tally or TierTally()
    count = load(store, KEYS[: len(blocks)], blocks, [need == "w" for need in needs_window], part_bytes, tally)
    return [bytes(block) for block in blocks[:count]]


def whole(number):
    return bytes(content_of(number))


def in_part(number):
    return bytes(content_of(number, PART_BYTES)).ljust(BLOCK_BYTES, b"\0")


# --- usable blocks ----------------------------------------------------------------------------------------------------


def test_num_usable_requires_complete_blocks_in_window():
    """Compared with a check of each position that the row reads."""
    rng = random.Random(3)
    for _ in range(3000):
        size, first = rng.randint(1, 4), rng.randint(0, 4)
        windows = [rng.randint(2, 14) for _ in range(rng.randint(1, 2))]
        window = max(windows)
        is_whole = [rng.random() < 0.7 for _ in range(rng.randint(0, 7))]
        num_tokens = (first + len(is_whole)) * size + rng.randint(0, 5)
        usable = [0]
        for count in range(1, len(is_whole) + 1):
            row = min((first + count) * size, num_tokens - 1)
            seen = {position // size for position in range(max(0, row - window + 1), row + 1)} - set(range(first))
            if all(is_whole[block - first] for block in seen if block < first + count):
                usable.append(count)
        assert num_usable(is_whole, first, num_tokens, size, [*map(SlidingWindow, windows)]) == usable[-1]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"whole": range(6)}, 6),
        ({"whole": range(3)}, 3),
        ({"in_part": range(6)}, 0),
        ({"whole": (4, 5), "in_part": range(4)}, 6),  # the row at 24 reads 16 to 23
        ({"whole": (5,), "in_part": range(5)}, 0),
        ({"whole": (0, 1, 5), "in_part": (2, 3, 4)}, 2),
        ({"whole": (0, 2, 3, 4), "in_part": (1, 5)}, 5),
        ({"whole": (1, 4, 5), "in_part": (0, 2, 3)}, 6),
        ({"whole": (4, 5), "in_part": (0, 1, 3)}, 0),
        ({"whole": (4, 5), "in_part": range(6)}, 6),  # some blocks are stored in both ways
        ({"whole": (3, 4), "in_part": range(6)}, 0),
    ],
)
def test_lookup_combines_blocks_with_and_without_window_part(kinds, expected):
    store = TieredStore([memory(**kinds)])
    assert look_up(store, KEYS, 0, 100, SIZE, [SlidingWindow(WINDOW)]) == expected
    store.close()


def test_lookup_assumes_caller_has_blocks_before_first():
    store = TieredStore([memory(in_part=(0, 1, 2), whole=(3,))])
    assert look_up(store, KEYS, 4, 100, SIZE, [SlidingWindow(WINDOW)]) == 0
    assert look_up(store, KEYS[3:], 3, 100, SIZE, [SlidingWindow(WINDOW)]) == 1
    assert look_up(store, KEYS[2:], 2, 16, SIZE, [SlidingWindow(4)]) == 2, "the last token is computed, and sees 12"
    assert look_up(store, KEYS[2:], 2, 16, SIZE, [SlidingWindow(5)]) == 0, "or 11"
    assert look_up(store, KEYS[2:], 2, 17, SIZE, [SlidingWindow(5)]) == 2


def test_connector_lookup_considers_sliding_window():
    store = TieredStore([memory(whole=(4, 5), in_part=range(4))])
    request = SimpleNamespace(request_id="r", block_hashes=KEYS, num_tokens=50, expects_kv=False)
    found = []
    for window in (WINDOW, WINDOW + 1, 0):
        answered = threading.Event()
        connector = StoreConnector(store, SIZE, answered.set, kinds=[SlidingWindow(window)] if window else [])
        assert connector.get_num_new_matched_tokens(request, 0) is None or answered.is_set()
        assert answered.wait(10)
        found.append(connector.get_num_new_matched_tokens(request, 0))
        assert connector.keys_to_save(KEYS) == {*KEYS[:4], *KEYS[6:]}
        assert connector.keys_to_save(KEYS, only_first_group=True) == set(KEYS[6:])
        connector.close()
    assert found == [24, 0, 0]


def test_lookup_after_short_load_offers_only_resumable_blocks():
    """After a load that ended early, a lookup offers fewer blocks.

    The store failed once, and still reports all blocks. At the end of the loaded ones a window part is missing.
    """
    store = TieredStore([memory(whole=(1, 2, 4, 5), in_part=(0, 3))])
    request = SimpleNamespace(request_id="r", block_hashes=KEYS[:6], num_tokens=50, expects_kv=False)
    answered = threading.Semaphore(0)
    connector = StoreConnector(store, SIZE, answered.release, kinds=[SlidingWindow(WINDOW)])

    def found():
        if (count := connector.get_num_new_matched_tokens(request, 0)) is None:
            assert answered.acquire(timeout=10)
            count = connector.get_num_new_matched_tokens(request, 0)
        return count

    def end(num_ordered, num_blocks):
        order = KVTransfer(0, TransferDirection.LOAD, KEYS[:num_ordered], list(range(num_ordered)), "r")
        connector.transfer_ended(order, num_blocks)

    assert found() == 24
    end(6, 4)
    assert found() == 12, "the row behind four blocks sees the fourth, which is there in part"
    end(3, 3)
    connector.lookup_given_up(request)
    assert found() == 24
    end(6, 4)
    assert connector.num_lookups == 1
    connector.request_finished(request, [])
    assert connector.num_lookups == 0
    connector.close()


class Asked:
    """A store that has some blocks whole and some in part. calls: records the lookups."""

    def __init__(self, whole=(), in_part=()):
        self.whole, self.in_part, self.calls = whole, in_part, []

    def num_matched(self, keys, *, only_first_group=False):
        numbers = [KEYS.index(key) for key in keys]
        self.calls.append(("in part" if only_first_group else "whole", *numbers[:1], len(keys)))
        there = self.in_part if only_first_group else self.whole
        return next((index for index, number in enumerate(numbers) if number not in there), len(numbers))


@pytest.mark.parametrize(
    ("kinds", "first", "num_tokens", "count", "calls"),
    [
        ({}, 0, 100, 0, [("whole", 0, 8), ("in part", 0, 8)]),
        ({"whole": range(8)}, 0, 100, 8, [("whole", 0, 8)]),
        ({"whole": (0,)}, 0, 100, 1, [("whole", 0, 8), ("in part", 1, 7), ("whole", 1, 7), ("in part", 1, 7)]),
        # The row at 32 reads the positions 24 to 31: two blocks. The row at 40 of a longer sequence reads the same two.
        ({"whole": (6, 7), "in_part": range(8)}, 0, 100, 8, [("whole", 0, 8), ("in part", 0, 8), ("whole", 6, 2)]),
        ({"whole": (6, 7), "in_part": range(8)}, 2, 100, 8, [("whole", 0, 8), ("in part", 0, 8), ("whole", 6, 2)]),
        (
            {"whole": (6, 7), "in_part": range(7)},
            0,
            100,
            8,
            [("whole", 0, 8), ("in part", 0, 8), ("whole", 7, 1), ("whole", 6, 2)],
        ),
        # The last token is computed: the row at 31 reads 23 to 30, three blocks.
        ({"whole": (6, 7), "in_part": range(8)}, 0, 32, 0, [("whole", 0, 8), ("in part", 0, 8), ("whole", 5, 3)]),
        ({"whole": (5, 6, 7), "in_part": range(8)}, 0, 32, 8, [("whole", 0, 8), ("in part", 0, 8), ("whole", 5, 3)]),
    ],
)
def test_lookup_queries_complete_blocks_for_next_row(kinds, first, num_tokens, count, calls):
    store = Asked(**kinds)
    assert look_up(store, KEYS, first, num_tokens, SIZE, [SlidingWindow(WINDOW)]) == count
    assert store.calls == calls


def test_lookup_considers_widest_window():
    store = Asked(whole=(6, 7), in_part=range(8))
    kinds = [SlidingWindow(WINDOW), SlidingWindow(WINDOW + SIZE)]
    assert look_up(store, KEYS, 0, 100, SIZE, kinds) == 0
    assert store.calls[-1] == ("whole", 5, 3)
    store = Asked(whole=(5, 6, 7), in_part=range(8))
    assert look_up(store, KEYS, 0, 100, SIZE, kinds) == 8


def test_lookup_checks_all_blocks_if_window_covers_them():
    store = Asked(whole=(0,), in_part=(0, 1))
    assert look_up(store, KEYS[:2], 0, 100, SIZE, [SlidingWindow(100)]) == 1
    assert store.calls == [("whole", 0, 2), ("in part", 1, 1), ("whole", 0, 2)]
    store = Asked(whole=(1,), in_part=(0,))
    assert look_up(store, KEYS[:2], 2, 100, SIZE, [SlidingWindow(13)]) == 0
    assert store.calls == [("whole", 0, 2), ("in part", 0, 2), ("whole", 1, 1), ("whole", 0, 2)]


# --- load -------------------------------------------------------------------------------------------------------------


def test_load_accepts_either_kind_outside_window():
    store = TieredStore([memory(whole=(1, 4, 5), in_part=(0, 2, 3))])
    assert loaded(store, "....ww") == [in_part(0), whole(1), in_part(2), in_part(3), whole(4), whole(5)]
    assert loaded(store, "...www") == [in_part(0), whole(1), in_part(2)]
    assert loaded(store, "w") == []
    assert loaded(store, "........") == [in_part(0), whole(1), in_part(2), in_part(3), whole(4), whole(5)]


@pytest.mark.parametrize(
    ("kinds", "needs_window", "asked"),
    [
        ({"whole": (0, 1)}, "....", [("whole", 0), ("in part", 2)]),
        ({"whole": (0, 1)}, "..ww", [("whole", 0)]),
        ({"in_part": (0, 1)}, "....", [("whole", 0), ("in part", 0), ("whole", 2)]),
        ({}, "..", [("whole", 0), ("in part", 0)]),
    ],
)
def test_load_requests_each_block_once_per_kind(kinds, needs_window, asked):
    store, seen = TieredStore([memory(**kinds)]), []
    load_from = store.load

    def note(keys, blocks, tally, *, only_first_group):
        seen.append(("in part" if only_first_group else "whole", KEYS.index(keys[0])))
        return load_from(keys, blocks, tally, only_first_group=only_first_group)

    store.load = note
    loaded(store, needs_window)
    assert seen == asked


def test_load_falls_back_from_corrupt_block_to_first_group():
    store = memory(whole=(0, 1, 2), in_part=(1,))
    store.pool._nodes["a"][KEYS[1]].kv_data = b"spoilt"
    tiers = TieredStore([store])
    assert loaded(tiers, "..w")[:1] + loaded(tiers, "..w")[2:] == [whole(0), whole(2)]
    assert loaded(tiers, ".ww") == [whole(0)]


def test_first_group_content_is_not_loaded_as_complete_block():
    store = memory(in_part=(0,))
    store.save(KEYS[1:2], [content_of(1, PART_BYTES)])  # under the key of a whole block
    assert loaded(TieredStore([store]), ".w") == [in_part(0)]
    assert store.stats().num_corrupt == 1


def test_load_combines_tiers_and_counts_actual_bytes():
    fast, slow = memory(in_part=(0, 1), whole=(3,)), memory(whole=(0, 2))
    fast.name, slow.name, tally = "fast", "slow", TierTally()
    assert loaded(TieredStore([fast, slow]), "...w", tally=tally) == [whole(0), in_part(1), whole(2), whole(3)]
    assert {move[:3] for move in tally.moves()} == {
        ("fast", 2, PART_BYTES + BLOCK_BYTES),
        ("slow", 2, 2 * BLOCK_BYTES),
    }


# --- save -------------------------------------------------------------------------------------------------------------


def saved(store, has_window, tally=None):
    numbers = range(len(has_window))
    blocks, kinds = [content_of(number) for number in numbers], [kind == "w" for kind in has_window]
    return save(store, KEYS[: len(blocks)], blocks, kinds, PART_BYTES, tally or TierTally())


def test_save_stores_each_block_under_key_of_its_kind():
    store, tally = memory(), TierTally()
    assert saved(TieredStore([store]), "w..ww.", tally) == 6
    records = store.pool._nodes["a"]
    assert set(records) == {*(KEYS[i] for i in (0, 3, 4)), *(key_of_first_group(KEYS[i]) for i in (1, 2, 5))}
    assert [len(record.kv_data) - 32 for record in records.values()] == [24, 8, 8, 24, 24, 8]
    [move] = tally.moves()
    assert move[:3] == ("memory", 6, 3 * BLOCK_BYTES + 3 * PART_BYTES)


def test_save_counts_blocks_before_first_failure():
    store = memory()
    keep = store.save
    store.save = lambda keys, blocks: keep(keys, blocks) if len(blocks[0]) == BLOCK_BYTES else 1
    assert saved(TieredStore([store]), "w..ww.") == 2
    assert store.num_matched(KEYS[3:]) == 2, "those behind it are kept all the same"


def test_first_group_is_saved_only_if_store_lacks_block():
    first, second, third = memory(whole=(0,)), memory(in_part=(0,)), memory()
    store = TieredStore([first, second, third])
    assert store.lacks(KEYS[:2]) == set(KEYS[:2])
    assert store.lacks(KEYS[:2], only_first_group=True) == set(KEYS[:2])
    assert saved(store, ".") == 1
    assert [len(each.pool._nodes["a"]) for each in (first, second, third)] == [1, 1, 1]
    assert store.lacks(KEYS[:1], only_first_group=True) == set()


def test_store_without_parts_is_skipped_for_first_group():
    store, other = memory(whole=(0,)), memory()
    guarded = GuardedStore.of(store, keeps_parts=False)
    alone = TieredStore([guarded])
    assert alone.lacks(KEYS, only_first_group=True) == set()
    assert alone.num_matched(KEYS[1:], only_first_group=True) == 0
    assert saved(alone, ".") == 0
    assert loaded(alone, "..") == [whole(0)]
    assert saved(TieredStore([guarded, other]), "..") == 2
    assert (len(store.pool._nodes["a"]), len(other.pool._nodes["a"])) == (1, 2)


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 0])
def test_disk_store_keeps_both_kinds_after_restart(tmp_path, part_bytes):
    """part_bytes = 0: all layers of the model have windows."""
    disk = DiskStore(tmp_path, BLOCK_BYTES, 1 << 20, part_bytes=part_bytes)
    put(disk, whole=(2, 3), in_part=(0, 1), part_bytes=part_bytes)
    again = DiskStore(tmp_path, BLOCK_BYTES, 1 << 20, part_bytes=part_bytes)
    for store in (disk, again):
        found = loaded(TieredStore([store]), "..ww", part_bytes)
        assert [block[:part_bytes] for block in found[:2]] == [whole(0)[:part_bytes], whole(1)[:part_bytes]]
        assert found[2:] == [whole(2), whole(3)]
        assert store.stats().num_corrupt == 0
    without = DiskStore(tmp_path, BLOCK_BYTES, 1 << 20)
    assert without.stats().num_blocks == 2
    assert without.stats().num_bytes == again.stats().num_bytes
