"""A block in a store has two parts: they go to a block and a window block, or to the block alone."""

import queue

import pytest
import torch
from late_queue import LateStream

from octavo.data.scheduler_output import (
    CachedRequestData,
    KVTransfer,
    SchedulerOutput,
    TransferDirection,
    are_whole,
    need_parts,
)
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker import stored_blocks, transfer_threads
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.stored_blocks import StoredBlocks
from octavo.worker.transfer_threads import KVTransferThreads

LOAD, SAVE = TransferDirection.LOAD, TransferDirection.SAVE
KEYS = [bytes([number]) * 32 for number in range(5)]
FULL, NEAR = KVShape(1, 8), KVShape(3, 8, window=6)


@pytest.fixture(autouse=True, params=["cpu", "late"])
def either_device(request, monkeypatch):
    """A CPU, or a device that copies late."""
    if request.param == "late":
        monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: LateStream())


class Moved:
    """A KV cache with a store; every number of a block or window block is that of its key, or -1."""

    def __init__(self, monkeypatch, shapes, dtype):
        monkeypatch.setattr(transfer_threads, "piece_blocks", lambda _: 2)
        self.cache = PagedKVCache(
            KVLayout(shapes), num_blocks=[12, 9], block_size=4, dtype=dtype, device=torch.device("cpu")
        )
        self.pool, self.ended = GlobalKVPool(1000), queue.SimpleQueue()
        self.store = MemoryStore(self.pool, "a", self.cache.stored_block_bytes)
        self.threads = KVTransferThreads(
            StoredBlocks(self.cache), TieredStore([self.store]), self.ended.put, num_threads=1
        )
        self.clear()

    def clear(self):
        for each in self.cache.memory:
            each.fill_(-1)

    def move(self, direction, keys, *block_ids):
        order = KVTransfer(1, direction, keys, list(block_ids))
        empty = CachedRequestData.make_empty()
        self.threads.begin(SchedulerOutput(1, [], empty, {}, 0, kv_transfers=[order]))
        return self.ended.get(timeout=10).num_blocks

    def numbers(self):
        """Return the number in each block and each window block."""
        for blocks in self.cache.memory:
            assert bool((blocks == blocks[:, :1]).all())
        return [[int(row[0]) if len(row) else None for row in each] for each in self.pieces]

    @property
    def pieces(self):
        return self.cache.groups[0].blocks, self.cache.groups[1].blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_block_is_saved_with_window_part_and_wanted_parts_load(monkeypatch, dtype):
    moved = Moved(monkeypatch, (NEAR, FULL, NEAR), dtype)
    for number, (block, window_block) in enumerate([(7, 2), (1, 8), (0, 0), (11, 3), (5, 5)]):
        moved.cache.groups[0].blocks[block] = number
        moved.cache.groups[1].blocks[window_block] = 10 + number
    assert moved.move(SAVE, KEYS, [7, 1, 0, 11, 5], [2, 8, 0, 3, 5]) == 5
    kept = moved.pool._nodes["a"][KEYS[1]].kv_data[32:]
    assert len(kept) == moved.cache.block_bytes + moved.cache.groups[1].block_bytes
    moved.clear()
    assert moved.move(LOAD, KEYS, [0, 1, 2, 3, 4], [-1, -1, -1, 6, 1]) == 5  # the last two are within the window
    assert moved.numbers() == [[0, 1, 2, 3, 4, *[-1] * 7], [-1, 14, -1, -1, -1, -1, 13, -1, -1]]


def test_block_without_window_part_is_saved_and_loaded_without_it(monkeypatch):
    moved = Moved(monkeypatch, (NEAR, FULL, NEAR), torch.bfloat16)
    for number in range(5):
        moved.cache.groups[0].blocks[number] = number
        moved.cache.groups[1].blocks[number] = 10 + number
    moved.cache.groups[1].blocks[8] = 50  # where -1 would be
    assert moved.move(SAVE, KEYS, [0, 1, 2, 3, 4], [-1, 1, -1, -1, 4]) == 5
    sizes = [len(each.kv_data) - 32 for each in moved.pool._nodes["a"].values()]
    assert sorted(sizes) == [moved.cache.block_bytes] * 3 + [moved.cache.stored_block_bytes] * 2
    moved.clear()
    assert moved.move(LOAD, KEYS, [5, 6, 7, 8, 9], [-1, -1, -1, -1, 0]) == 5
    assert moved.numbers() == [[*[-1] * 5, 0, 1, 2, 3, 4, -1, -1], [14, *[-1] * 8]]
    moved.clear()
    assert moved.move(LOAD, KEYS, [5, 6, 7, 8, 9], [-1, -1, 0, 1, 2]) == 2, "the third one's window part is nowhere"


def test_early_end_of_load_writes_no_part_of_remaining_blocks(monkeypatch):
    moved = Moved(monkeypatch, (FULL, NEAR), torch.bfloat16)
    for number in range(5):
        moved.cache.groups[0].blocks[number] = number
        moved.cache.groups[1].blocks[number] = 10 + number
    moved.move(SAVE, KEYS, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    moved.pool._nodes["a"][KEYS[2]].kv_data = b"spoilt"
    moved.clear()
    assert moved.move(LOAD, KEYS, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]) == 2
    assert moved.numbers() == [[0, 1, *[-1] * 10], [-1, -1, -1, 11, 10, *[-1] * 4]]


def test_zero_byte_blocks_transfer_only_window_parts(monkeypatch):
    """A block is then only a number, without bytes."""
    moved = Moved(monkeypatch, (NEAR, NEAR), torch.bfloat16)
    assert moved.cache.block_bytes == 0
    moved.cache.groups[1].blocks[3] = 13
    moved.cache.groups[1].blocks[4] = 14
    assert moved.move(SAVE, KEYS[:2], [9, 10], [3, 4]) == 2
    moved.clear()
    assert moved.move(LOAD, KEYS[:2], [0, 1], [-1, 5]) == 2
    assert moved.numbers()[1] == [-1] * 5 + [14] + [-1] * 3


def test_block_needed_by_one_window_group_requires_all_parts():
    """The window of one group ends before the block, the window of the other group does not."""
    assert need_parts([[5, 6, 7], [-1, -1, 2], [7, -1, 3]]) == [True, False, True]
    assert are_whole([[5, 6, 7], [-1, -1, 2], [7, -1, 3]]) == [False, False, True]
