"""Blocks of a transfer on a device that does its work late: one copy for a piece, in the right order."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager

import pytest
import torch
from late_queue import LateQueue, LateStream, OverwrittenError

from octavo.data.kv_groups import NO_BLOCK
from octavo.data.scheduler_output import CachedRequestData, KVTransfer, SchedulerOutput, TransferDirection
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker import stored_blocks, transfer_threads
from octavo.worker.host_copies import Passed
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.stored_blocks import StoredBlocks
from octavo.worker.transfer_threads import KVTransferThreads, staging_bytes

LOAD, SAVE = TransferDirection.LOAD, TransferDirection.SAVE
FULL, NEAR = KVShape(1, 8), KVShape(3, 8, window=6)
WHOLE = [[5, 2, 9], [1, 0, 3]]


def make_cache(shapes=(FULL, NEAR), dtype=torch.bfloat16, block_size=4):
    cache = PagedKVCache(
        KVLayout(shapes),
        num_blocks=[12, 9][: len(set(shapes))],
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for number, group in enumerate(cache.groups):
        contents = group.blocks.view(torch.uint8)
        contents.copy_(torch.arange(contents.numel()).view(contents.shape) % (251 - 10 * number))
    return cache


@pytest.fixture
def stream(monkeypatch):
    """The stream of the next buffers, all the same."""
    stream = LateStream()
    monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: stream)
    return stream


def make_buffer(cache, num_blocks):
    buffer = StoredBlocks(cache).make_buffer(num_blocks)
    stored_blocks.create_copy_stream(cache.device).log.clear()
    return buffer


def bytes_of(cache, group, block):
    return cache.groups[group].blocks.view(torch.uint8)[block].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_piece_is_gathered_and_copied_once(stream, dtype):
    cache = make_cache(dtype=dtype)
    buffer = make_buffer(cache, 4)
    buffer.read(WHOLE, Passed())
    assert stream.log == ["wait", "to device", "gather", "gather", "to host", "mark"]
    assert stream.num_waits == 1
    rows = [torch.frombuffer(view, dtype=torch.uint8) for view in buffer.views(3)]
    for row, blocks in zip(rows, zip(*WHOLE, strict=True), strict=True):
        assert torch.equal(row, torch.cat([bytes_of(cache, group, block) for group, block in enumerate(blocks)]))
    stream.log.clear()
    for group in cache.groups:
        group.blocks.view(torch.uint8).zero_()
    buffer.write([[0, 7, 4], [8, 2, 5]], Passed())
    assert stream.log == ["wait", "to device", "scatter", "scatter", "mark"]
    assert stream.num_waits == 2
    for row, blocks in zip(rows, ((0, 8), (7, 2), (4, 5)), strict=True):
        assert torch.equal(row, torch.cat([bytes_of(cache, group, block) for group, block in enumerate(blocks)]))
    written = [{0, 7, 4}, {8, 2, 5}]
    assert all(block in written[g] or not bytes_of(cache, g, block).any() for g in (0, 1) for block in range(9))


def test_missing_blocks_are_skipped(stream):
    cache = make_cache()
    buffer = make_buffer(cache, 6)
    block_ids = [[6, 7, 8, 9, 10, 11], [NO_BLOCK, 4, 5, NO_BLOCK, NO_BLOCK, 6]]
    buffer.read(block_ids, Passed())
    assert stream.log == ["wait", "to device", "gather", "gather", "gather", "to host", "mark"]
    before = [bytes_of(cache, 1, block) for block in range(9)]
    for group in cache.groups:
        group.blocks.view(torch.uint8).zero_()
    buffer.write([[0, 1, 2, 3, 4, 5], [NO_BLOCK, 0, 1, NO_BLOCK, NO_BLOCK, 2]], Passed())
    after = [bytes_of(cache, 1, block) for block in range(9)]
    assert all(map(torch.equal, after[:3], before[4:7]))
    assert not any(content.any() for content in after[3:])


def test_write_of_nothing_enqueues_nothing(stream):
    make_buffer(make_cache(), 2).write([[], []], Passed())
    assert stream.log == []


@pytest.mark.parametrize(
    ("shapes", "unit"), [((FULL, NEAR), torch.int64), ((KVShape(1, 1), KVShape(2, 3, window=6)), torch.int32)]
)
def test_device_copies_widest_integers_that_fit_all_groups(stream, shapes, unit):
    cache = make_cache(shapes, block_size=1)
    buffer = make_buffer(cache, 2)
    assert {part.blocks.dtype for part in buffer._parts} == {unit}
    buffer.read([[3, 4], [2, 5]], Passed())
    for row, blocks in zip(buffer.views(2), ((3, 2), (4, 5)), strict=True):
        assert bytes(row) == b"".join(
            bytes(bytes_of(cache, group, block).numpy()) for group, block in enumerate(blocks)
        )


def test_failed_copy_is_awaited(stream, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    buffer = make_buffer(make_cache(), 4)
    for name, move in (("scatter", buffer.write), ("gather", buffer.read)):
        monkeypatch.setattr(stream, name, fail)
        with pytest.raises(RuntimeError, match="no memory"):
            move(WHOLE, Passed())
        assert stream.num_made == len(stream.copies)


def test_staging_memory_is_as_planned(stream):
    blocks = StoredBlocks(make_cache())
    count = transfer_threads.piece_blocks(blocks.block_bytes)
    buffer = blocks.make_buffer(count)
    planned, ids = staging_bytes(blocks.block_bytes, 0), 2 * 8 * count
    assert buffer._host.nbytes == buffer._staged.nbytes
    assert 0 <= buffer._staged.nbytes - planned - ids < 64


class Moved:
    """A cache with late steps, and a store."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(transfer_threads, "piece_blocks", lambda _: 2)
        self.steps, self.cache, self.ended = LateQueue(), make_cache((FULL, FULL)), queue.SimpleQueue()
        monkeypatch.setattr(stored_blocks, "mark_steps", lambda _: self.steps.mark())
        self.store = MemoryStore(GlobalKVPool(1000), "a", self.cache.stored_block_bytes)
        self.threads = KVTransferThreads(
            StoredBlocks(self.cache), TieredStore([self.store]), self.ended.put, num_threads=1
        )
        self.blocks = self.cache.groups[0].blocks.view(torch.uint8)
        self.number = 0

    def begin(self, direction, keys, block_ids):
        self.number += 1
        self.send(kv_transfers=[KVTransfer(self.number, direction, keys, [block_ids])])

    def send(self, **orders):
        scheduled = SchedulerOutput(1, [], CachedRequestData.make_empty(), {}, 0, **orders)
        self.threads.cancel(scheduled)
        self.threads.begin(scheduled)

    def move(self, *order):
        self.begin(*order)
        return self.ended.get(timeout=10).num_blocks

    def saved(self, key):
        return bytes(self.store.pool._nodes["a"][key].kv_data[32:])


@pytest.fixture
def moved(monkeypatch, stream):
    return Moved(monkeypatch)


KEYS = [bytes([number]) * 32 for number in range(5)]


def test_save_reads_what_earlier_steps_write(moved):
    moved.steps.copies.append(lambda: moved.blocks[4].fill_(77))
    assert moved.move(SAVE, KEYS[:1], [4]) == 1
    assert moved.saved(KEYS[0]) == bytes([77]) * moved.cache.block_bytes


def test_new_buffer_waits_for_steps_that_used_its_memory(moved):
    moved.steps.copies.append(lambda: None)
    buffer = moved.threads._blocks.make_buffer(2)
    assert moved.steps.num_made == 0
    buffer.read([[1]], Passed())
    assert moved.steps.num_made == 1


def test_save_does_not_wait_for_later_steps(moved):
    before = moved.blocks[4].clone()
    moved.begin(SAVE, KEYS[:1], [4])
    moved.steps.copies.append(lambda: moved.blocks[4].fill_(77))
    assert moved.ended.get(timeout=10).num_blocks == 1
    assert moved.saved(KEYS[0]) == bytes(before.numpy())
    assert moved.steps.num_made == 0


def test_load_writes_after_earlier_steps_read(moved):
    before = moved.blocks[4].clone()
    moved.move(SAVE, KEYS[:1], [7])
    moved.steps.copies.append(lambda: moved.blocks[2].copy_(moved.blocks[4]))
    assert moved.move(LOAD, KEYS[:1], [4]) == 1
    moved.steps.mark().synchronize()
    assert torch.equal(moved.blocks[2], before)
    assert torch.equal(moved.blocks[4], moved.blocks[7])


def test_buffer_changed_before_its_copy_is_detected(moved, stream, monkeypatch):
    """This checks the stream itself."""
    assert moved.move(SAVE, KEYS, [0, 1, 2, 3, 4]) == 5
    monkeypatch.setattr(stream, "mark", Passed)
    moved.begin(LOAD, KEYS, [7, 8, 9, 10, 11])
    moved.ended.get(timeout=10)
    with pytest.raises(OverwrittenError):
        stream.run_to(len(stream.copies))


@pytest.mark.parametrize("direction", [LOAD, SAVE])
def test_cancel_waits_for_copies_on_device(moved, stream, direction):
    """The cancel begins while the thread waits for the device."""
    content = moved.blocks[4].clone()
    moved.move(SAVE, KEYS[:1], [4])
    cancelled, was_held = threading.Event(), []
    number = moved.number + 1

    def cancel():
        moved.send(kv_cancels=[number])
        moved.blocks[:] = 0xEE  # the blocks belong to another request now
        cancelled.set()

    def on_wait():
        stream.on_wait = lambda: None
        was_held.append(moved.threads._moving[number].lock.locked())
        threading.Thread(target=cancel, daemon=True).start()

    stream.on_wait = on_wait
    moved.begin(direction, KEYS[:1] if direction is LOAD else KEYS[1:2], [4])
    assert cancelled.wait(10)
    moved.threads.shutdown()
    stream.run_to(len(stream.copies))
    assert was_held == [True]
    assert bool((moved.blocks == 0xEE).all())
    assert moved.ended.empty()
    assert direction is LOAD or moved.saved(KEYS[1]) == bytes(content.numpy())


def test_buffers_of_loads_and_saves_have_own_streams(monkeypatch):
    streams = []
    monkeypatch.setattr(stored_blocks, "create_copy_stream", lambda _: streams.append(LateStream()) or streams[-1])
    cache = make_cache()
    store = MemoryStore(GlobalKVPool(1000), "a", cache.stored_block_bytes)
    KVTransferThreads(StoredBlocks(cache), TieredStore([store]), print, num_threads=3).shutdown()
    assert len(streams) == 4


def test_gpu_enqueues_on_stream_of_its_own(monkeypatch):
    """Streams and events are fakes."""
    log, current, copy = [], [], torch.Tensor.copy_

    class Stream:
        def __init__(self, device):
            log.append(device.type)

        def wait_event(self, event):
            log.append(("waits", event))

    class Event:
        def __init__(self, *, blocking):
            assert blocking

        def record(self, stream):
            log.append(("event", stream))

    @contextmanager
    def use(stream):
        current.append(stream)
        yield
        current.pop()

    def watch(target, source, non_blocking=False):
        log.append(("copy", current[-1], non_blocking))
        return copy(target, source)

    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", use)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "copy_", watch)
    monkeypatch.setattr(stored_blocks, "pinned_memory", lambda size: torch.zeros(size, dtype=torch.uint8))
    stream = stored_blocks.create_copy_stream(torch.device("cuda"))
    memory, rows, mark = stream.host_memory(6).view(3, 2), torch.tensor([2, 0]), Passed()
    stream.wait(mark)
    stream.copy(memory, torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8))
    gathered = torch.empty(2, 2, dtype=torch.uint8)
    stream.gather(gathered, memory, rows)
    assert gathered.tolist() == [[5, 6], [1, 2]]
    stream.scatter(memory, torch.tensor([0, 1]), gathered)
    assert memory.tolist() == [[5, 6], [1, 2], [5, 6]]
    assert isinstance(stream.mark(), Event)
    assert log == ["cuda", ("waits", mark), ("copy", stream._stream, True), ("event", stream._stream)]
