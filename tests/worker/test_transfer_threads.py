"""The worker's side of a store: bytes are right or missing, and after a cancel no block is touched."""

from __future__ import annotations

import hashlib
import queue
import random
import threading

import pytest
import torch
from faulty_store import FaultyStore, HangingStore, Panic
from late_queue import LateStream

from octavo.data.scheduler_output import CachedRequestData, KVTransfer, SchedulerOutput, TransferDirection
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker import stored_blocks, transfer_threads
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.stored_blocks import StoredBlocks
from octavo.worker.transfer_threads import KVTransferThreads

NUM_BLOCKS = 48
NUM_KEYS = 60
SENTINEL = 0xEE
LOAD, SAVE = TransferDirection.LOAD, TransferDirection.SAVE


class Moved:
    """A KV cache, and the threads that move its blocks to and from a store."""

    def __init__(self, make_store, dtype=torch.bfloat16, num_blocks=NUM_BLOCKS, num_threads=2):
        self.cache = PagedKVCache(
            KVLayout((KVShape(num_kv_heads=1, head_dim=8),) * 2),
            num_blocks=[num_blocks],
            block_size=4,
            dtype=dtype,
            device=torch.device("cpu"),
            num_scratch_blocks=3,
        )
        self.bytes = self.cache.groups[0].blocks.view(torch.uint8).view(num_blocks + 3, -1)
        self.store = make_store(self.cache.block_bytes)
        self.ended = queue.SimpleQueue()
        self.threads = KVTransferThreads(
            StoredBlocks(self.cache), TieredStore([self.store]), self.ended.put, num_threads=num_threads
        )
        self.num_orders = 0

    def begin(self, *orders, cancels=()):
        scheduled = SchedulerOutput(
            1, [], CachedRequestData.make_empty(), {}, 0, kv_transfers=list(orders), kv_cancels=list(cancels)
        )
        self.threads.cancel(scheduled)
        self.threads.begin(scheduled)

    def order(self, direction, keys, block_ids):
        self.num_orders += 1
        return KVTransfer(self.num_orders, direction, list(keys), [list(block_ids)])

    def move(self, direction, keys, block_ids):
        """Carry out one transfer; return the number of moved blocks."""
        order = self.order(direction, keys, block_ids)
        self.begin(order)
        transfer_id, count, *_ = self.ended.get(timeout=10)
        assert transfer_id == order.transfer_id
        return count

    def content(self, key):
        """Return the bytes that belong to a key, the same in every cache."""
        size = self.cache.block_bytes
        data = b"".join(hashlib.sha256(key + bytes([part])).digest() for part in range(-(-size // 32)))
        return torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8)

    def fill(self, keys, block_ids):
        for key, block_id in zip(keys, block_ids, strict=True):
            self.bytes[block_id] = self.content(key)

    def holds(self, key, block_id):
        return torch.equal(self.bytes[block_id], self.content(key))


def keys_of(count, first=0):
    return [bytes([first + index]) * 32 for index in range(count)]


@pytest.fixture
def small_pieces(monkeypatch):
    """Two blocks a piece, so that transfers have several pieces."""
    monkeypatch.setattr(transfer_threads, "_PIECE_BYTES", 1)
    monkeypatch.setattr(transfer_threads, "piece_blocks", lambda _: 2)


@pytest.fixture(params=["cpu", "late"])
def either_device(request, monkeypatch):
    """A CPU, or a device that copies late."""
    if request.param == "late":
        monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: LateStream())


def memory(block_bytes):
    return MemoryStore(GlobalKVPool(1000), "a", block_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.usefixtures("small_pieces", "either_device")
def test_saved_blocks_load_bit_for_bit(dtype):
    moved, keys = Moved(memory, dtype), keys_of(7)
    moved.fill(keys, range(7))
    assert moved.move(SAVE, keys, range(7)) == 7
    moved.bytes[:] = SENTINEL
    assert moved.move(LOAD, keys, [40, 3, 9, 20, 21, 5, 1]) == 7
    assert all(moved.holds(key, block) for key, block in zip(keys, [40, 3, 9, 20, 21, 5, 1], strict=True))
    touched = {40, 3, 9, 20, 21, 5, 1}
    assert all(bool((moved.bytes[block] == SENTINEL).all()) for block in range(NUM_BLOCKS + 3) if block not in touched)


@pytest.mark.usefixtures("small_pieces", "either_device")
def test_load_stops_before_first_corrupt_block():
    moved, keys = Moved(memory), keys_of(7)
    moved.fill(keys, range(7))
    moved.move(SAVE, keys, range(7))
    moved.store.pool._nodes["a"][keys[3]].kv_data = b"spoilt"
    moved.bytes[:] = SENTINEL
    assert moved.move(LOAD, keys, range(7)) == 3
    assert [moved.holds(key, block) for block, key in enumerate(keys)] == [True] * 3 + [False] * 4
    assert bool((moved.bytes[3:] == SENTINEL).all())  # not even refused bytes


@pytest.mark.usefixtures("small_pieces")
def test_finished_transfer_reports_moves_and_evictions_per_tier():
    moved, keys = Moved(lambda block_bytes: MemoryStore(GlobalKVPool(4), "a", block_bytes)), keys_of(7)
    moved.fill(keys, range(7))
    moved.begin(moved.order(SAVE, keys, range(7)))
    saved = moved.ended.get(timeout=10)
    [move] = saved.moves
    assert (move.tier, move.num_blocks, move.num_bytes) == ("memory", 7, 7 * moved.cache.block_bytes)
    assert saved.evicted == (("memory", 3),)
    moved.begin(moved.order(LOAD, keys[3:], range(4)))
    loaded = moved.ended.get(timeout=10)
    assert [(move.tier, move.num_blocks) for move in loaded.moves] == [("memory", 4)]
    assert (loaded.num_blocks, loaded.evicted) == (4, ())


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, Panic, MemoryError])
@pytest.mark.parametrize("direction", [LOAD, SAVE])
def test_store_exception_is_reported_once_as_failed_transfer(direction, error):
    moved, keys = Moved(memory), keys_of(2)

    def fail(*_):
        raise error

    moved.store.load = moved.store.save = fail
    assert moved.move(direction, keys, range(2)) == 0
    assert moved.threads.num_moving == 0
    assert moved.ended.empty()


@pytest.mark.parametrize("direction", [LOAD, SAVE])
@pytest.mark.usefixtures("either_device")
def test_cancelled_transfer_writes_no_block_and_reports_nothing(direction):
    stores = []

    def make(block_bytes):
        stores.append(HangingStore(GlobalKVPool(), "a", block_bytes))
        return stores[0]

    moved, keys = Moved(make), keys_of(4)
    moved.fill(keys, range(4))
    moved.move(SAVE, keys, range(4))
    stores[0].pool.remove(keys if direction is SAVE else [])
    stores[0].hangs = {"load", "save"}
    order = moved.order(direction, keys, range(10, 14) if direction is LOAD else range(4))
    moved.begin(order)
    assert stores[0].entered.wait(10)
    moved.begin(cancels=[order.transfer_id, 999])
    moved.bytes[:] = SENTINEL  # the blocks belong to another request now
    stores[0].release.set()
    moved.threads._threads[direction].submit(lambda: moved.ended.put("behind it"))
    moved.threads._threads[direction].submit(lambda: moved.ended.put("behind it"))
    assert {moved.ended.get(timeout=10), moved.ended.get(timeout=10)} == {"behind it"}
    moved.threads.shutdown()
    assert bool((moved.bytes == SENTINEL).all())
    if direction is SAVE:  # blocks copied out before the cancel are right, and may be kept
        assert all(
            moved.store.pool._nodes["a"][key].kv_data[32:] == moved.content(key).numpy().tobytes() for key in keys
        )


def test_transfer_without_buffer_is_reported_as_failed(monkeypatch):
    """A store that hangs keeps its buffer, and there is no memory for another one."""
    moved, keys = Moved(memory), keys_of(1)
    moved.threads._buffers[SAVE].get()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(moved.threads._blocks, "make_buffer", fail)
    assert moved.move(SAVE, keys, [0]) == 0


def test_hanging_save_blocks_neither_loads_nor_shutdown(monkeypatch):
    monkeypatch.setattr(transfer_threads, "_SHUTDOWN_S", 0.2)
    stores = []

    def make(block_bytes):
        stores.append(HangingStore(GlobalKVPool(), "a", block_bytes))
        return stores[0]

    moved, keys = Moved(make), keys_of(2)
    moved.fill(keys, range(2))
    moved.move(SAVE, keys, range(2))
    stores[0].hangs = {"save", "close"}
    moved.begin(moved.order(SAVE, keys_of(2, first=10), range(2)))
    assert stores[0].entered.wait(10)
    assert moved.move(LOAD, keys, range(4, 6)) == 2
    ending = threading.Thread(target=moved.threads.shutdown, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    assert moved.ended.empty()
    stores[0].release.set()


def test_second_shutdown_and_late_transfers_do_nothing():
    moved = Moved(memory)
    moved.threads.shutdown()
    moved.begin(moved.order(SAVE, keys_of(1), [0]))
    moved.threads.shutdown()
    assert moved.ended.empty()


class Fuzz:
    """Random transfers with a faulty store, while blocks are reused as soon as this is allowed."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.keys = keys_of(NUM_KEYS)
        make = lambda block_bytes: FaultyStore(GlobalKVPool(1000), "a", block_bytes, seed=seed, raises=False)  # noqa: E731
        self.moved = Moved(make, num_threads=3)
        self.moved.bytes[:] = SENTINEL
        self.free = list(range(NUM_BLOCKS))
        self.open = {}
        self.num_ended = 0

    def run(self, num_faults):
        while self.moved.store.num_faults < num_faults:
            self.step()
        while self.open:
            self.take(self.moved.ended.get(timeout=30))
        self.moved.threads.shutdown()
        assert self.moved.ended.empty()
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        assert bool((self.moved.bytes == SENTINEL).all())

    def step(self):
        orders = []
        while self.free and len(self.open) < 12 and self.rng.random() < 0.8:
            count = min(self.rng.randint(1, 6), len(self.free))
            first = self.rng.randrange(NUM_KEYS - count)
            keys, blocks = self.keys[first : first + count], [self.free.pop() for _ in range(count)]
            direction = self.rng.choice([LOAD, SAVE])
            if direction is SAVE:
                self.moved.fill(keys, blocks)
            orders.append(self.moved.order(direction, keys, blocks))
        cancels = [each for each in self.open if self.rng.random() < 0.05]
        self.open |= {order.transfer_id: order for order in orders}
        self.moved.begin(*orders, cancels=cancels)
        for transfer_id in cancels:
            order = self.open.pop(transfer_id)
            self.give_back(order)
        while not self.moved.ended.empty() or len(self.open) >= 12:
            self.take(self.moved.ended.get(timeout=30))

    def take(self, ended):
        transfer_id, count, *_ = ended
        order = self.open.pop(transfer_id, None)
        if order is None:
            return  # the transfer ended before the cancel
        self.num_ended += 1
        if order.direction is LOAD:
            loaded = list(zip(order.keys, order.block_ids[0], strict=True))[:count]
            assert all(self.moved.holds(key, block) for key, block in loaded), "wrong bytes in a block"
        else:
            assert all(self.moved.holds(*each) for each in zip(order.keys, order.block_ids[0], strict=True))
        self.give_back(order)

    def give_back(self, order):
        """From now on, no byte of these blocks may be written."""
        for block in order.block_ids[0]:
            self.moved.bytes[block] = SENTINEL
        self.free += order.block_ids[0]


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    "num_faults", [3000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["some faults", "100k faults"]
)
@pytest.mark.usefixtures("small_pieces")
def test_faulty_store_puts_no_wrong_byte_into_block(num_faults):
    """Each block that a load reports as moved is compared with the saved bytes: every corrupt record is detected."""
    fuzz = Fuzz(7)
    fuzz.run(num_faults)
    store = fuzz.moved.store
    assert store.stats().num_corrupt > store.num_spoilt / 2  # the rest was evicted before it was read again
    assert min(store.faults.values()) > 0
    assert fuzz.num_ended > num_faults / 10


@pytest.mark.turn(12)
@pytest.mark.usefixtures("small_pieces")
def test_faulty_store_puts_no_wrong_byte_into_block_of_late_device(monkeypatch):
    monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: LateStream())
    Fuzz(8).run(300)


def test_fuzz_detects_missing_checksums(monkeypatch):
    """This checks the fuzz itself: it fails without checksums."""
    monkeypatch.setattr("octavo.kv_transfer.memory._checksum", lambda key, content: bytes(32))
    with pytest.raises((AssertionError, queue.Empty)):
        Fuzz(7).run(3000)


def test_transfers_run_in_separate_thread():
    moved, caller = Moved(memory), threading.get_ident()
    seen = []
    moved.store.save = lambda keys, blocks: (seen.append(threading.get_ident()), len(keys))[1]
    assert moved.move(SAVE, keys_of(1), [0]) == 1
    assert seen != [caller]
