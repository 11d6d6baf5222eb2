"""The pool of one process: published blocks are found, copied, limited and counted."""

from __future__ import annotations

import threading

import pytest

from octavo.errors import ConfigError
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.memory import GlobalKVPool, KVBlock, MemoryStore

KEYS = [bytes([index]) * 32 for index in range(200)]
BLOCK_BYTES = 64


def content(key):
    return memoryview(key * (BLOCK_BYTES // 32))


def buffers(count):
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(count)]


def transferred(pool, hashes, node_id="b", name="r"):
    """Return the arguments of the callback of a transfer."""
    arrived, got = threading.Event(), []

    def callback(request_id, *, success):
        got.append((request_id, success))
        arrived.set()

    pool.async_transfer(name, hashes, node_id, callback)
    assert arrived.wait(10)
    return got[0]


def test_publish_returns_true_only_for_new_block():
    pool = GlobalKVPool()
    assert pool.publish(KEYS[0], "a", [1, 2], b"first") is True
    assert pool.publish(KEYS[0], "a", [1, 2], b"first") is False
    assert pool.publish(KEYS[0], "b", [1, 2], b"first") is False
    pool.remove(KEYS[:1])
    assert pool.publish(KEYS[0], "a", [1, 2], b"first") is True
    assert (pool.total_cached_blocks, pool.num_cached_blocks("a"), pool.num_cached_blocks("b")) == (1, 1, 0)


def test_node_evicts_block_above_limit_of_100():
    pool = GlobalKVPool()
    for key in KEYS[:101]:
        pool.publish(key, "a", [1], b"x")
    assert (pool.total_cached_blocks, pool.num_evicted) == (100, 1)
    assert pool.query(KEYS[:1]) == (0, [])
    pool.publish(KEYS[150], "b", [1], b"x")  # another node's blocks are not evicted for it
    assert (pool.total_cached_blocks, pool.num_cached_blocks("a"), pool.num_cached_blocks("b")) == (101, 100, 1)
    found = sum(pool.query([key])[0] for key in KEYS)
    assert found == pool.total_cached_blocks


def test_query_stops_at_first_gap_and_refreshes_access_time():
    pool = GlobalKVPool(3)
    for index in (0, 1, 3):
        pool.publish(KEYS[index], "a", [0] * (index + 4), b"x")
    assert pool.query(KEYS[:4]) == (9, ["a", "a"])
    before = pool._nodes["a"][KEYS[0]].access_time
    pool.query(KEYS[:1])
    assert pool._nodes["a"][KEYS[0]].access_time > before
    pool.publish(KEYS[4], "a", [1], b"x")  # the least recently used is the one after the gap
    assert [pool.query([key])[0] > 0 for key in KEYS[:5]] == [True, True, False, False, True]


def test_publish_and_transfer_copy_bytes():
    pool, data = GlobalKVPool(), bytearray(b"content")
    pool.publish(KEYS[0], "a", [7], data)
    data[:] = b"changed"
    assert transferred(pool, [KEYS[0]]) == ("r", True)
    copy, kept = pool.get(KEYS[0], "b"), pool.get(KEYS[0], "a")
    assert (copy.kv_data, copy.node_id, copy.token_ids) == (b"content", "b", (7,))
    assert (kept.kv_data, kept.node_id) == (b"content", "a")
    assert copy.kv_data is not kept.kv_data
    assert (pool.total_cached_blocks, pool.num_cached_blocks("b"), pool.num_bytes("b")) == (2, 1, 7)
    assert pool.query(KEYS[:1]) == (1, ["a"]), "the first holder is named, and the tokens count once"


def test_transfer_works_without_callback():
    pool = GlobalKVPool()
    pool.publish(KEYS[0], "a", [7], b"x")
    pool.async_transfer("r", KEYS[:1], "b")
    assert pool.wait_for_transfer("r", 10)
    assert pool.get(KEYS[0], "b").kv_data == b"x"


def test_transfer_stops_at_first_missing_block_and_reports_failure():
    pool = GlobalKVPool()
    for index in (0, 1, 3):
        pool.publish(KEYS[index], "a", [7], b"x")
    assert transferred(pool, KEYS[:4]) == ("r", False)
    assert [pool.get(key, "b") is not None for key in KEYS[:4]] == [True, True, False, False]
    assert transferred(pool, KEYS[:2]) == ("r", True), "what the target holds is not copied again"
    assert pool.num_cached_blocks("b") == 2
    assert transferred(pool, []) == ("r", True)


def test_transfer_above_node_limit_copies_first_blocks():
    pool = GlobalKVPool(2)
    for index, node_id in enumerate("acd"):
        pool.publish(KEYS[index], node_id, [7], b"x")
    pool.publish(KEYS[9], "b", [7], b"own")
    assert transferred(pool, KEYS[:3]) == ("r", False)
    assert [pool.get(key, "b") is not None for key in (*KEYS[:3], KEYS[9])] == [True, True, False, False]
    assert pool.num_evicted_of("b") == 1


def test_copy_is_found_after_source_is_evicted():
    pool = GlobalKVPool(1)
    pool.publish(KEYS[0], "a", [7, 8], b"x")
    transferred(pool, KEYS[:1])
    pool.publish(KEYS[1], "a", [7], b"y")
    assert pool.get(KEYS[0], "a") is None
    assert pool.query(KEYS[:1]) == (2, ["b"])
    assert pool.publish(KEYS[0], "c", [7, 8], b"x") is False
    pool.remove(KEYS[:1])
    assert (pool.query(KEYS[:1]), pool.lacks(KEYS[:1])) == ((0, []), {KEYS[0]})


def test_kv_block_access_time_defaults_to_zero():
    assert KVBlock(KEYS[0], "a", (1, 2), b"x").access_time == 0.0


def test_transfer_completion_is_reported_once_and_forgotten():
    pool = GlobalKVPool()
    assert not pool.is_transfer_complete("r")
    transferred(pool, [KEYS[0]])
    assert pool.wait_for_transfer("r", 10)
    assert not pool.is_transfer_complete("r")
    assert not pool._open
    assert not pool._complete


@pytest.fixture
def slow():
    """A pool with a transfer that has not ended, and the function that ends it."""
    pool, entered, release = GlobalKVPool(), threading.Event(), threading.Event()
    pool.async_transfer("slow", [], "b", lambda *_, **__: (entered.set(), release.wait()))
    assert entered.wait(10)
    yield pool, release.set
    release.set()


def test_end_of_transfer_is_reported_after_a_timeout(slow):
    pool, end = slow
    assert not pool.wait_for_transfer("slow", 0.01)
    end()
    assert pool.wait_for_transfer("slow", 10)
    assert not pool.is_transfer_complete("slow")
    assert (pool._open, pool._complete) == (set(), set())


def test_end_of_forgotten_transfer_is_not_recorded(slow):
    pool, end = slow
    pool.forget_transfer("slow")
    end()
    transferred(pool, [], name="next")
    assert pool.wait_for_transfer("next", 10)
    assert (pool._open, pool._complete) == (set(), set())
    transferred(pool, [], name="ended")
    with pool._ended:
        assert pool._ended.wait_for(lambda: "ended" in pool._complete, 10)
    pool.forget_transfer("ended")
    assert not pool.is_transfer_complete("ended")


def test_concurrent_threads_keep_counts_consistent():
    pool = GlobalKVPool(50)

    def work(node_id):
        for index, key in enumerate(KEYS):
            pool.publish(key, node_id, [1], b"x")
            pool.query(KEYS[index - 3 : index])
            if index % 7 == 0:
                pool.remove([KEYS[index // 2]])

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_nodes = {key for node in pool._nodes.values() for key in node}
    assert in_nodes == set(pool._holders)
    assert sum(len(node) for node in pool._nodes.values()) == pool.total_cached_blocks
    assert all(len(node) <= 50 for node in pool._nodes.values())


def test_pool_capacity_of_zero_is_refused():
    with pytest.raises(ConfigError, match="max_blocks_per_node must be 1 or more, got 0"):
        GlobalKVPool(0)


def test_store_loads_blocks_saved_by_another_node():
    pool = GlobalKVPool()
    a, b = (MemoryStore(pool, name, BLOCK_BYTES) for name in "ab")
    assert b.lacks(KEYS[:3]) == set(KEYS[:3])
    assert a.save(KEYS[:3], [content(key) for key in KEYS[:3]]) == 3
    assert b.lacks(KEYS[:4]) == {KEYS[3]}
    assert b.num_matched(KEYS[:4]) == 3
    blocks = buffers(4)
    assert b.load(KEYS[:4], blocks) == 3
    assert blocks[:3] == [content(key) for key in KEYS[:3]]
    assert a.stats().num_blocks == 3
    assert b.stats().num_blocks == 3, "copies of what it loaded"
    assert pool.query(KEYS[:4]) == (48, ["a"] * 3), "blocks of 16 tokens"
    MemoryStore(pool, "c", BLOCK_BYTES, block_size=5).save(KEYS[5:6], [content(KEYS[5])])
    assert pool.query(KEYS[5:6]) == (5, ["c"])
    a.forget(KEYS[1:2])
    assert b.num_matched(KEYS[:3]) == 1
    a.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data, _: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data, _: bytes([data[0] ^ 1]) + data[1:],
        lambda data, _: data[:-1],
        lambda data, _: data + b"\0",
        lambda data, _: b"",
        lambda _, other: other,
    ],
)
def test_corrupt_block_is_a_miss_and_dropped(spoil):
    pool = GlobalKVPool()
    store = MemoryStore(pool, "a", BLOCK_BYTES)
    store.save(KEYS[:3], [content(key) for key in KEYS[:3]])
    record, other = (pool._nodes["a"][key] for key in KEYS[1:3])
    record.kv_data = spoil(record.kv_data, other.kv_data)
    assert store.load(KEYS[:3], buffers(3)) == 1
    assert store.stats().num_corrupt == 1
    assert store.num_matched(KEYS[:3]) == 1  # the store has dropped it
    assert store.lacks(KEYS[:3]) == {KEYS[1]}


def test_transfer_timeout_raises_store_error():
    pool, release = GlobalKVPool(), threading.Event()
    pool.async_transfer("before", [], "x", lambda *_, **__: release.wait())
    store = MemoryStore(pool, "a", BLOCK_BYTES, timeout_s=0.01)
    with pytest.raises(StoreError, match=r"did not transfer 1 blocks within 0.01 s"):
        store.load(KEYS[:1], buffers(1))
    assert store.stats().num_errors == 1
    assert pool._open == {"before"}
    release.set()


def test_stats_cover_one_node():
    pool = GlobalKVPool(3)
    first = MemoryStore(pool, "a", BLOCK_BYTES)
    for key in KEYS[:4]:
        first.save([key], [content(key)])
    later = MemoryStore(pool, "a", BLOCK_BYTES)
    size = BLOCK_BYTES + 32
    assert first.stats() == StoreStats(3, 3 * size, 3 * size, 1)
    assert later.stats() == StoreStats(3, 3 * size, 3 * size, 0)
    assert MemoryStore(pool, "b", BLOCK_BYTES).stats() == StoreStats(0, 0, 3 * size)
    assert (later._timeout_s, later.block_size) == (10.0, 16)


def test_transfers_of_store_have_unique_names(monkeypatch):
    pool, names = GlobalKVPool(), []
    store, transfer = MemoryStore(pool, "a", BLOCK_BYTES), pool.async_transfer
    monkeypatch.setattr(pool, "async_transfer", lambda name, *args: (names.append(name), transfer(name, *args))[1])
    for _ in range(3):
        assert store.load(KEYS[:1], buffers(1)) == 0
    assert len(set(names)) == 3


def test_token_count_uses_num_tokens_if_given():
    assert KVBlock(KEYS[0], "a", (1, 2), b"x").token_count == 2
    assert KVBlock(KEYS[0], "a", (), b"x", num_tokens=0).token_count == 0
    assert KVBlock(KEYS[0], "a", (), b"x", num_tokens=5).token_count == 5


def test_transfer_prefers_copy_on_target():
    pool = GlobalKVPool(2)
    pool.publish(KEYS[0], "a", [7], b"x")
    assert transferred(pool, KEYS[:1]) == ("r", True)
    used = pool._nodes["a"][KEYS[0]].access_time
    assert transferred(pool, KEYS[:1]) == ("r", True)
    assert pool._nodes["a"][KEYS[0]].access_time == used
    assert pool._nodes["b"][KEYS[0]].access_time > used


def test_transfer_of_local_block_copies_nothing():
    pool = GlobalKVPool(2)
    pool.publish(KEYS[0], "b", [7], b"x")
    block = pool.get(KEYS[0], "b")
    assert transferred(pool, KEYS[:1]) == ("r", True)
    assert pool.get(KEYS[0], "b") is block
    assert pool.total_cached_blocks == 1


def test_copy_keeps_token_count_and_has_access_time():
    pool = GlobalKVPool(2)
    pool.publish(KEYS[0], "a", [], b"x", num_tokens=5)
    transferred(pool, KEYS[:1])
    copy, kept = pool.get(KEYS[0], "b"), pool.get(KEYS[0], "a")
    assert (copy.num_tokens, copy.token_ids, copy.block_hash) == (5, (), KEYS[0])
    assert copy.access_time > 0
    assert kept.num_tokens == 5


def test_is_transfer_complete_returns_true_once():
    pool = GlobalKVPool()
    pool.async_transfer("r", [], "b")
    with pool._ended:
        assert pool._ended.wait_for(lambda: not pool._open, 10)
    assert [pool.is_transfer_complete("r") for _ in range(2)] == [True, False]
    pool.async_transfer("r", [], "b")
    assert [pool.wait_for_transfer("r", 10), pool.wait_for_transfer("r", 0.0)] == [True, False]


def test_evicted_block_keeps_other_holders():
    pool = GlobalKVPool(1)
    pool.publish(KEYS[0], "a", [7], b"x")
    transferred(pool, KEYS[:1])
    pool.publish(KEYS[1], "b", [7], b"y")
    assert (pool.query(KEYS[:1]), pool.num_evicted, pool.num_evicted_of("b"), pool.num_evicted_of("a")) == (
        (1, ["a"]), 1, 1, 0,
    )  # fmt: skip
    pool.publish(KEYS[2], "a", [7], b"z")
    assert pool.lacks(KEYS[:3]) == {KEYS[0]}
    assert set(pool._holders) == set(KEYS[1:3])


def test_pool_capacity_may_be_one_and_defaults_to_100():
    assert GlobalKVPool(1).max_blocks_per_node == 1
    assert GlobalKVPool().max_blocks_per_node == 100


def test_load_returns_blocks_before_missing_one():
    pool = GlobalKVPool()
    store = MemoryStore(pool, "a", BLOCK_BYTES)
    store.save(KEYS[:1], [content(KEYS[0])])
    store.save(KEYS[2:3], [content(KEYS[2])])
    blocks = buffers(3)
    assert store.load(KEYS[:3], blocks) == 1
    assert blocks == [content(KEYS[0]), *buffers(2)]
    assert (store.stats().num_corrupt, store.stats().num_errors) == (0, 0)
