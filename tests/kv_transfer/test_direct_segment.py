"""Memory of a prefill engine: its blocks are kept, evicted, pinned and dropped."""

from __future__ import annotations

import hashlib

import pytest

from octavo.errors import ConfigError
from octavo.kv_transfer.direct_segment import Segment, checksum

BLOCK_BYTES = 8
KEYS = [bytes([number]) * 32 for number in range(6)]


def block(number):
    return memoryview(bytes([number + 1]) * BLOCK_BYTES)


def content(segment, number):
    """Return the content stored under a key, or None."""
    found = []
    is_known = segment.read(KEYS[number], lambda stored, known_sum: found.append((bytes(stored), known_sum)))
    assert is_known is bool(found)
    assert all(known_sum == checksum(KEYS[number], memoryview(stored)) for stored, known_sum in found)
    return found[0][0] if found else None


def put(segment, *numbers):
    return [segment.put(KEYS[number], block(number)) for number in numbers]


def test_segment_capacity_is_whole_blocks():
    assert [Segment(BLOCK_BYTES, size).num_slots for size in (8, 15, 16)] == [1, 1, 2]
    with pytest.raises(ConfigError, match=r"^kv_direct_bytes is 7, but one block takes 8 bytes: increase it$"):
        Segment(BLOCK_BYTES, 7)


def test_checksum_covers_key_and_block():
    assert checksum(b"key", memoryview(b"block")) == hashlib.sha256(b"keyblock").digest()


def test_stored_blocks_are_found_by_key():
    segment = Segment(BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert put(segment, 0, 1) == [True, True]
    assert (len(segment), segment.num_matched(KEYS), segment.num_matched(KEYS[:2])) == (2, 2, 2)
    assert (segment.num_matched(KEYS[2:]), segment.lacks(KEYS[1:4])) == (0, {KEYS[2], KEYS[3]})
    assert [content(segment, number) for number in range(3)] == [bytes(block(0)), bytes(block(1)), None]


def test_least_recently_used_block_is_evicted():
    segment = Segment(BLOCK_BYTES, 3 * BLOCK_BYTES)
    put(segment, 0, 1, 2)
    put(segment, 0)  # a second put counts as a use
    content(segment, 1)  # so does a read
    assert put(segment, 3) == [True]
    assert segment.lacks(KEYS[:4]) == {KEYS[2]}
    assert put(segment, 4, 5) == [True, True]
    assert segment.lacks(KEYS) == {KEYS[0], KEYS[1], KEYS[2]}
    assert (segment.num_evicted, len(segment)) == (3, 3)
    assert [content(segment, number) for number in (3, 4, 5)] == [bytes(block(number)) for number in (3, 4, 5)]


def test_forgotten_slot_is_reused_before_eviction():
    segment = Segment(BLOCK_BYTES, 2 * BLOCK_BYTES)
    put(segment, 0, 1)
    segment.forget([KEYS[5], KEYS[0]])
    assert (segment.lacks(KEYS[:2]), segment.num_evicted) == ({KEYS[0]}, 0)
    put(segment, 2)
    assert (segment.lacks(KEYS[:3]), segment.num_evicted) == ({KEYS[0]}, 0)
    put(segment, 3)
    assert (segment.lacks(KEYS[:4]), segment.num_evicted) == ({KEYS[0], KEYS[1]}, 1)


def test_block_is_not_evicted_while_read():
    segment = Segment(BLOCK_BYTES, 2 * BLOCK_BYTES)
    put(segment, 0, 1)
    segment.read(KEYS[0], lambda *_: segment.read(KEYS[0], lambda *_: put(segment, 1, 2)))
    assert segment.lacks(KEYS[:3]) == {KEYS[1]}
    put(segment, 3)  # it can be evicted again
    assert segment.lacks(KEYS[:4]) == {KEYS[0], KEYS[1]}


def test_put_fails_while_all_blocks_are_read():
    segment, results = Segment(BLOCK_BYTES, BLOCK_BYTES), []
    put(segment, 0)
    segment.read(KEYS[0], lambda *_: results.extend(put(segment, 1, 0)))
    assert results == [False, True]
    assert (segment.num_evicted, segment.lacks(KEYS[:2])) == (0, {KEYS[1]})


def test_forgotten_block_is_freed_after_last_reader():
    segment, results = Segment(BLOCK_BYTES, BLOCK_BYTES), []
    put(segment, 0)

    def inner(*_):
        segment.forget(KEYS[:1])
        results.extend(put(segment, 1))

    def outer(stored, _):
        segment.read(KEYS[0], inner)
        results.extend(put(segment, 1))
        results.append(bytes(stored))

    assert segment.read(KEYS[0], outer)
    assert results == [False, False, bytes(block(0))]
    assert put(segment, 1) == [True]
    assert (content(segment, 1), segment.num_evicted, len(segment._free)) == (bytes(block(1)), 0, 0)


def test_failed_read_releases_block():
    segment = Segment(BLOCK_BYTES, BLOCK_BYTES)
    put(segment, 0)
    with pytest.raises(ZeroDivisionError):
        segment.read(KEYS[0], lambda *_: 1 / 0)
    assert put(segment, 1) == [True]


def test_concurrent_puts_of_same_block_store_it_once(monkeypatch):
    segment, is_first = Segment(BLOCK_BYTES, 3 * BLOCK_BYTES), []

    def meanwhile(key, stored):
        if not is_first:
            is_first.append(True)
            assert put(segment, 0) == [True]
        return checksum(key, stored)

    monkeypatch.setattr("octavo.kv_transfer.direct_segment.checksum", meanwhile)
    assert put(segment, 0, 1, 2) == [True] * 3
    assert (len(segment), segment.num_evicted, segment.lacks(KEYS[:3])) == (3, 0, set())
