"""Pieces of recurrent states between slots and buffers, on a CPU and on a device that does its work late."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from late_queue import LateStream

from octavo.data.scheduler_output import CachedRequestData, KVTransfer, SchedulerOutput, TransferDirection
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.stored_states import keys_of_state
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.kv_layout import KVLayout, KVShape, StateShape
from octavo.worker import stored_blocks, transfer_threads
from octavo.worker.host_copies import Passed
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.stored_blocks import StoredBlocks
from octavo.worker.transfer_threads import KVTransferThreads

LOAD, SAVE = TransferDirection.LOAD, TransferDirection.SAVE
KEYS = [bytes([number]) * 32 for number in range(5)]


def make_cache():
    """Blocks of 256 bytes, and states of 576 bytes: two pieces and a quarter."""
    cache = PagedKVCache(
        KVLayout((KVShape(1, 16), StateShape(((5, 17),), ((10, 9),)))),
        num_blocks=[12, 6],
        block_size=4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        state_dtype=torch.bfloat16,
    )
    for number, group in enumerate(cache.groups):
        contents = group.blocks.view(torch.uint8)
        contents.copy_(torch.arange(contents.numel()).view(contents.shape) % (251 - 10 * number))
    return cache


@pytest.fixture(params=["cpu", "device"])
def cache(request, monkeypatch):
    if request.param == "device":
        monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: LateStream())
    return make_cache()


def test_state_is_divided_into_pieces_of_a_block(cache):
    blocks = StoredBlocks(cache)
    assert (blocks.block_bytes, blocks.part_bytes, blocks.num_state_pieces) == (256, 256, 3)
    assert cache.states.shape == (6, 576)


@pytest.mark.parametrize("piece_blocks", [1, 2, 3, 5])
def test_state_moves_to_another_slot_through_buffers(cache, piece_blocks):
    blocks, states = StoredBlocks(cache), cache.states
    before, stored = states.clone(), []
    reading, writing = blocks.make_buffer(piece_blocks), blocks.make_buffer(piece_blocks)
    for first in range(0, 3, piece_blocks):
        count = min(piece_blocks, 3 - first)
        for view in reading.views(count):
            view[:] = bytes([9]) * 256
        reading.read_state(4, first, count, Passed())
        stored += [bytes(view) for view in reading.views(count)]
        for view, content in zip(writing.views(count), stored[first:], strict=True):
            view[:] = content
        writing.write_state(1, first, count, Passed())
    assert b"".join(stored) == bytes(before[4].numpy()) + bytes(192)
    assert torch.equal(states[1], before[4])
    kept = [0, 2, 3, 4, 5]
    assert torch.equal(states[kept], before[kept])


class Moved:
    """A cache, and a store; a piece of a transfer has two blocks."""

    def __init__(self, monkeypatch, cache, store_type=MemoryStore):
        monkeypatch.setattr(transfer_threads, "piece_blocks", lambda _: 2)
        self.cache, self.ended = cache, queue.SimpleQueue()
        self.store = store_type(GlobalKVPool(1000), "a", cache.stored_block_bytes)
        self.threads = KVTransferThreads(StoredBlocks(cache), TieredStore([self.store]), self.ended.put, num_threads=1)
        self.number = 0

    def move(self, direction, count, block_ids, states):
        self.number += 1
        self.send(kv_transfers=[KVTransfer(self.number, direction, KEYS[:count], [block_ids], states=states)])
        return self.ended.get(timeout=10).num_blocks

    def send(self, **orders):
        scheduled = SchedulerOutput(1, [], CachedRequestData.make_empty(), {}, 0, **orders)
        self.threads.cancel(scheduled)
        self.threads.begin(scheduled)


def test_states_are_saved_and_loaded_with_their_blocks(monkeypatch, cache):
    moved, states, blocks = Moved(monkeypatch, cache), cache.states, cache.groups[0].blocks
    before = states.clone()
    assert moved.move(SAVE, 3, [1, 2, 3], {0: 5, 2: 4}) == 3
    assert moved.store.pool.total_cached_blocks == 3 + 2 * 3
    assert moved.move(LOAD, 3, [7, 8, 9], {2: 0}) == 3
    assert torch.equal(states[0], before[4])
    assert torch.equal(states[1:], before[1:])
    assert torch.equal(blocks[7:10], blocks[1:4])
    assert moved.move(LOAD, 1, [7], {0: 0}) == 1
    assert torch.equal(states[0], before[5])
    moved.threads.shutdown()


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_load_without_a_piece_of_the_state_is_incomplete(monkeypatch, cache, piece):
    moved = Moved(monkeypatch, cache)
    moved.move(SAVE, 3, [1, 2, 3], {2: 4})
    moved.store.forget(keys_of_state(KEYS[2], 3)[piece : piece + 1])
    assert moved.move(LOAD, 3, [7, 8, 9], {2: 0}) == 2
    moved.threads.shutdown()


def test_load_without_a_block_does_not_write_the_state(monkeypatch, cache):
    moved = Moved(monkeypatch, cache)
    moved.move(SAVE, 3, [1, 2, 3], {2: 4})
    moved.store.forget(KEYS[1:2])
    before = cache.states.clone()
    assert moved.move(LOAD, 3, [7, 8, 9], {2: 0}) == 1
    assert torch.equal(cache.states, before)
    moved.threads.shutdown()


@pytest.mark.parametrize("direction", [LOAD, SAVE])
def test_cancelled_transfer_does_not_access_slots(monkeypatch, cache, direction):
    """The cancel arrives while the store moves the second of two pieces."""

    class Cancelling(MemoryStore):
        is_armed = False

        def _cancel(self, keys):
            if self.is_armed and keys_of_state(KEYS[0], 3)[0 if direction is SAVE else 2] in keys:
                moved.send(kv_cancels=[moved.number])
                moved.cache.states[4] = 0xEE  # the slot belongs to another request now
                cancelled.set()

        def load(self, keys, blocks):
            self._cancel(keys)
            return super().load(keys, blocks)

        def save(self, keys, blocks):
            self._cancel(keys)
            return super().save(keys, blocks)

    moved, cancelled = Moved(monkeypatch, cache, Cancelling), threading.Event()
    if direction is LOAD:
        moved.move(SAVE, 1, [1], {0: 3})
    moved.store.is_armed = True
    moved.number += 1
    moved.send(kv_transfers=[KVTransfer(moved.number, direction, KEYS[:1], [[7]], states={0: 4})])
    assert cancelled.wait(10)
    moved.threads.shutdown()
    assert bool((cache.states[4] == 0xEE).all())
    assert moved.ended.empty()
    last = keys_of_state(KEYS[0], 3)[2]
    assert direction is LOAD or moved.store.lacks([last]) == {last}
