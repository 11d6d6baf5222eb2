"""A disk store's index of its files, and the times at which it reads its directory."""

from __future__ import annotations

import math
import shutil

import pytest
from kv_transfer.disk_blocks import BLOCK_BYTES, keys_from, save

from octavo.kv_transfer import disk_index
from octavo.kv_transfer.connector import _Lookup
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.disk_index import BlockFile, DiskIndex

A, B, C = b"a", b"b", b"c"


@pytest.fixture
def index():
    index = DiskIndex()
    index.add(BlockFile("one", 10, (A, B)), 1)
    index.add(BlockFile("two", 20, (C,)), 2)
    return index


def test_index_finds_files_by_name_and_key(index):
    assert (index.num_blocks, index.num_bytes, index.names()) == (3, 30, {"one", "two"})
    assert ("one" in index, "none" in index) == (True, False)
    assert index.lacking([A, b"d", C]) == {b"d"}
    assert index.files_of([A, B, C]) == (3, ["one", "two"])
    assert index.files_of([A, b"d", C]) == (1, ["one"])


def test_run_follows_keys_of_one_file(index):
    file = BlockFile("one", 10, (A, B))
    assert index.run([A, B, C]) == (file, 0, 2)
    assert index.run([B, C]) == (file, 1, 1)
    assert index.run([A, C]) == (file, 0, 1)
    assert index.run([b"d"]) is None


def test_dropped_file_is_forgotten(index):
    assert index.drop("one") == BlockFile("one", 10, (A, B))
    assert index.drop("one") is None
    assert (index.num_blocks, index.num_bytes, index.oldest()) == (1, 20, (2, "two"))


def test_newer_file_holds_shared_key(index):
    index.add(BlockFile("three", 5, (A,)), 3)
    assert index.files_of([A]) == (1, ["three"])
    index.drop("one")
    assert (index.files_of([A]), index.lacking([B])) == ((1, ["three"]), {B})


def test_file_added_twice_counts_once(index):
    index.add(BlockFile("one", 7, (A,)), 5)
    assert (index.num_bytes, index.num_blocks, index.oldest()) == (27, 2, (2, "two"))


def test_oldest_file_is_least_recently_used(index):
    assert index.oldest() == (1, "one")
    index.used("two", 9)  # changes nothing while another file is older
    assert index.oldest() == (1, "one")
    index.used("one", 3)
    assert index.oldest() == (2, "two")
    index.drop("two")
    assert index.oldest() == (3, "one")
    index.drop("one")
    assert index.oldest() is None
    index.used("one", 4)
    assert index.oldest() is None


def test_age_entries_of_dropped_files_are_bounded():
    index = DiskIndex()
    for number in range(5000):
        index.add(BlockFile(f"{number}", 1), number)
        if number >= 10:
            index.drop(f"{number - 10}")
    assert len(index._by_age) <= 2 * 10 + 1024 + 1
    assert index.oldest() == (4990, "4990")


def test_age_entries_are_rebuilt_when_mostly_stale(monkeypatch):
    monkeypatch.setattr(disk_index, "_MIN_SPARE", 2)
    index, lengths = DiskIndex(), []
    for used_ns in range(8):
        index.add(BlockFile("a", 1, (A,)), used_ns)
        lengths.append(len(index._by_age))
    assert lengths == [1, 2, 3, 4, 1, 2, 3, 4]
    assert index.oldest() == (7, "a")
    for number in range(3):
        index.add(BlockFile(f"{number}", 1), number)
    assert index.oldest() == (0, "0")
    assert (index.num_bytes, index.num_blocks) == (4, 1)


def test_duplicate_key_in_file_counts_once(index):
    index.add(BlockFile("twice", 5, (b"d", b"e", b"d")), 3)
    assert (index.num_blocks, index.holders([b"d"])) == (5, {"twice"})
    assert index.run([b"d", b"e", b"d", A]) == (BlockFile("twice", 5, (b"d", b"e", b"d")), 0, 3)
    index.drop("twice")
    assert (index.num_blocks, index.holders([b"d"])) == (3, set())


def test_holders_returns_all_files_of_keys(index):
    index.add(BlockFile("three", 5, (A,)), 3)
    assert index.holders([A, C, b"d"]) == {"one", "two", "three"}
    assert index.files_of([A, B]) == (2, ["three", "one"])
    assert index.files_of([]) == (0, [])
    index.drop("three")
    assert index.files_of([A, B]) == (2, ["one"])


def test_directory_is_listed_after_pause_or_at_once_if_deleted(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "kv", BLOCK_BYTES, 1 << 20)
    directory, lists = store._directory, []
    assert directory._next_look_at > 0
    save(store, keys_from(0, 2))
    assert directory._temporaries == set()
    monkeypatch.setattr(directory, "_list", lambda: lists.append(None))
    monkeypatch.setattr(directory, "_seen_ns", None)
    directory._next_look_at = math.inf
    directory.look()
    assert lists == []
    directory._next_look_at = 0.0
    directory.look()
    assert len(lists) == 1
    directory._next_look_at = math.inf
    shutil.rmtree(tmp_path / "kv")
    directory.look()
    assert len(lists) == 2


def test_lookup_ends_when_complete_expired_or_unwanted():
    def taken(count=1, now=1.0, **fields):
        lookup = _Lookup(2, 6, **{"num_expected": 6, "until": 10.0, "found": 3, **fields})
        lookup.take(count, now)
        return lookup.end

    assert taken() is None
    assert taken(count=4) == 6  # all expected blocks
    assert taken(now=10.0) == 3  # the deadline has passed
    assert taken(is_wanted=False) == 3


def test_lookup_retries_after_growing_pauses():
    lookup = _Lookup(0, 6, num_expected=6)
    pauses = []
    for now in range(40):
        lookup.take(min(now + 1, 5), float(now))
        if lookup.end is not None:
            break
        pauses.append(lookup.again_at - now)
    assert len(pauses) > 3
    assert pauses == sorted(pauses)
    assert pauses[1] == pytest.approx(2 * pauses[0])
