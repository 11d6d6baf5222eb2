"""Copies blocks between the KV cache and the buffers of transfers.

A CPU copies with numpy in one thread, because torch would use all cores. On a GPU, each buffer has a stream, and blocks
are gathered on the device to cross the bus in one copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch

from octavo.data.kv_groups import NO_BLOCK
from octavo.data.scheduler_output import need_parts
from octavo.kv_transfer.stored_states import count_pieces
from octavo.worker.host_copies import CudaQueue, Passed
from octavo.worker.pinned_memory import pinned_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.worker.host_copies import Mark
    from octavo.worker.kv_cache import PagedKVCache

_ALIGNMENT = 64  # bytes
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # devices copy item by item


class CopyStream(Protocol):
    """A device's stream."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return device-accessible host memory, uint8."""
        ...

    def wait(self, mark: Mark) -> None:
        """Delay later work until a mark, perhaps of another stream, is reached."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy."""
        ...

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        """Enqueue target[i] = source[rows[i]]."""
        ...

    def scatter(self, target: Tensor, rows: Tensor, source: Tensor) -> None:
        """Enqueue target[rows[i]] = source[i]."""
        ...

    def mark(self) -> Mark:
        """Mark all enqueued work."""
        ...


class CudaStream:
    """A GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def host_memory(self, num_bytes: int) -> Tensor:
        """See `CopyStream`."""
        return pinned_memory(num_bytes)

    def wait(self, mark: Mark) -> None:
        """See `CopyStream`."""
        self._stream.wait_event(cast("torch.cuda.Event", mark))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            torch.index_select(source, 0, rows, out=target)

    def scatter(self, target: Tensor, rows: Tensor, source: Tensor) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            target.index_copy_(0, rows, source)

    def mark(self) -> Mark:
        """See `CopyStream`. Waiting threads sleep."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        mark: Mark = event
        return mark


class PieceBuffer(Protocol):
    """Host memory for a piece of a transfer, used by one thread at a time.

    All copies have ended when a method returns or raises. block_ids: by KV group; `NO_BLOCK` is skipped. after: the
    copies wait for this mark. The memory of `count` blocks also has `count` pieces of a recurrent state, from the piece
    `first` on.
    """

    def views(self, count: int) -> list[memoryview]:
        """Return the memory of `count` blocks."""
        ...

    def write(self, block_ids: list[list[int]], after: Mark) -> None:
        """Copy to the KV cache."""
        ...

    def read(self, block_ids: list[list[int]], after: Mark) -> None:
        """Copy from the KV cache."""
        ...

    def write_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """Copy pieces to a slot."""
        ...

    def read_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """Copy pieces from a slot. Zeros follow the last piece."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A KV group's blocks, and their columns in a buffer."""

    blocks: Tensor
    columns: slice


class TransferredBlocks(Protocol):
    """The KV cache's blocks, as transfers see them.

    block_bytes: bytes of a stored block, with all KV groups of tokens and all heads. part_bytes: of its first group.
    num_state_pieces: see `octavo.kv_transfer.stored_states`.
    """

    block_bytes: int
    part_bytes: int
    num_state_pieces: int

    def make_buffer(self, num_blocks: int) -> PieceBuffer:
        """Allocate a buffer."""
        ...

    def mark(self) -> Mark:
        """Return a mark after all enqueued steps and the newest step's block copies."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait for other processes to reach a mark, so that copies do not wait for them with a lock."""
        ...

    def need_all(self, block_ids: list[list[int]]) -> list[bool]:
        """Return, for each block, whether the content of all KV groups is needed, not only the first group's."""
        ...


class StoredBlocks:
    """The `TransferredBlocks` of one process."""

    def __init__(self, kv_cache: PagedKVCache) -> None:
        groups = kv_cache.groups_of_tokens
        self.block_bytes, self.part_bytes = kv_cache.stored_block_bytes, kv_cache.block_bytes
        self._states, self._device = kv_cache.states, kv_cache.device
        state_bytes = 0 if self._states is None else self._states.shape[1]
        self.num_state_pieces = count_pieces(state_bytes, self.block_bytes)
        self._parts: list[_Part] = []
        start = 0
        for group in groups:
            end = start + group.block_bytes
            self._parts.append(_Part(group.blocks.view(torch.uint8), slice(start, end)))
            start = end

    def make_buffer(self, num_blocks: int) -> PieceBuffer:
        """See `TransferredBlocks`."""
        stream = create_copy_stream(self._device)
        if stream is None:
            rows = np.empty((num_blocks, self.block_bytes), np.uint8)
            parts = [
                HostPart(group, part.blocks.numpy(), rows[:, part.columns]) for group, part in enumerate(self._parts)
            ]
            return HostBuffer(rows, parts, self._state_parts())
        buffer = StagedBuffer(self._parts, self.block_bytes, num_blocks, stream, self._device, self._states)
        stream.wait(self.mark())  # the buffer may reuse memory of running steps
        return buffer

    def _state_parts(self) -> list[StatePart]:
        return [] if self._states is None else [StatePart(self._states.numpy(), 0, self._states.shape[1])]

    def mark(self) -> Mark:
        """See `TransferredBlocks`."""
        return mark_steps(self._device)

    def wait(self, mark: Mark) -> None:
        """Do nothing, because there is one process."""

    def need_all(self, block_ids: list[list[int]]) -> list[bool]:
        """See `TransferredBlocks`."""
        return need_parts(block_ids) if len(self._parts) > 1 else [True] * len(block_ids[0])


class HostPart(NamedTuple):
    """A part of a KV group's blocks [num_blocks, ...], and of a buffer's rows [num_rows, ...], of equal shapes.

    is_repeated: True if an earlier part has the same content, so that only writes need this one.
    """

    group: int
    blocks: NDArray[np.uint8]
    rows: NDArray[np.uint8]
    is_repeated: bool = False


class StatePart(NamedTuple):
    """Neighbouring bytes of a sequence's states, uint8 [num_slots, num_bytes].

    place: of the first byte in a stored state. Several parts may have the same place, and have the same content then.
    """

    slots: NDArray[np.uint8]
    place: int
    num_bytes: int


class HostBuffer:
    """The `PieceBuffer` of a CPU. rows: a block each."""

    def __init__(self, rows: NDArray[np.uint8], parts: Sequence[HostPart], states: Sequence[StatePart] = ()) -> None:
        self._rows, self._parts, self._states = rows, parts, states

    def views(self, count: int) -> list[memoryview]:
        """See `PieceBuffer`."""
        return [memoryview(row) for row in self._rows[:count]]

    def write(self, block_ids: list[list[int]], after: Mark) -> None:
        """See `PieceBuffer`."""
        after.synchronize()
        for group, blocks, rows, _ in self._parts:
            for row, block_id in enumerate(block_ids[group]):
                if block_id != NO_BLOCK:
                    np.copyto(blocks[block_id], rows[row])

    def read(self, block_ids: list[list[int]], after: Mark) -> None:
        """See `PieceBuffer`."""
        after.synchronize()
        for group, blocks, rows, is_repeated in self._parts:
            if is_repeated:
                continue
            for row, block_id in enumerate(block_ids[group]):
                if block_id != NO_BLOCK:
                    np.copyto(rows[row], blocks[block_id])

    def write_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """See `PieceBuffer`."""
        after.synchronize()
        for state, piece in self._in_both(slot, first, count):
            np.copyto(state, piece)

    def read_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """See `PieceBuffer`."""
        after.synchronize()
        self._rows[:count] = 0
        for state, piece in self._in_both(slot, first, count):
            np.copyto(piece, state)

    def _in_both(self, slot: int, first: int, count: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield bytes of a slot, and the same bytes of pieces."""
        start, pieces = first * self._rows.shape[1], self._rows[:count].reshape(-1)
        end = start + len(pieces)
        for slots, place, num_bytes in self._states:
            if place < end and start < place + num_bytes:
                both = slice(max(start, place), min(end, place + num_bytes))
                yield (
                    slots[slot, both.start - place : both.stop - place],
                    pieces[both.start - start : both.stop - start],
                )


class StagedBuffer:
    """The `PieceBuffer` of a device. Host and device memory have the same layout: ids, then a row per block.

    Only the buffer's own stream uses the device memory.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        block_bytes: int,
        num_blocks: int,
        stream: CopyStream,
        device: torch.device,
        states: Tensor | None = None,
    ) -> None:
        self._states = states
        ids_bytes = 8 * len(parts) * num_blocks
        self._head_bytes = -(-ids_bytes // _ALIGNMENT) * _ALIGNMENT
        self._block_bytes, self._stream = block_bytes, stream
        num_bytes = self._head_bytes + num_blocks * block_bytes
        self._host = stream.host_memory(num_bytes)
        self._staged = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host_ids, self._ids = (
            memory[:ids_bytes].view(torch.int64).view(len(parts), num_blocks) for memory in (self._host, self._staged)
        )
        self._host_rows, rows = (
            memory[self._head_bytes :].view(num_blocks, block_bytes) for memory in (self._host, self._staged)
        )
        size = math.gcd(8, block_bytes, *(part.columns.start for part in parts))
        unit = _UNITS[size]
        self._parts = [
            _Copied(
                part.blocks.view(unit) if part.blocks.nbytes else part.blocks,
                rows.view(unit)[:, part.columns.start // size : part.columns.stop // size],
            )
            for part in parts
        ]

    def views(self, count: int) -> list[memoryview]:
        """See `PieceBuffer`."""
        return [memoryview(row) for row in self._host_rows[:count].numpy()]

    def write(self, block_ids: list[list[int]], after: Mark) -> None:
        """See `PieceBuffer`."""
        if not block_ids[0]:
            return
        stream, end = self._stream, self._head_bytes + len(block_ids[0]) * self._block_bytes
        self._put(block_ids)
        try:
            stream.wait(after)
            stream.copy(self._staged[:end], self._host[:end])
            for part, ids, all_ids in zip(self._parts, self._ids, block_ids, strict=True):
                for run in part.runs(all_ids):
                    stream.scatter(part.blocks, ids[run], part.rows[run])
        finally:
            stream.mark().synchronize()

    def read(self, block_ids: list[list[int]], after: Mark) -> None:
        """See `PieceBuffer`."""
        stream, count = self._stream, len(block_ids[0])
        end = self._head_bytes + count * self._block_bytes
        self._put(block_ids)
        try:
            stream.wait(after)
            stream.copy(self._staged[: self._head_bytes], self._host[: self._head_bytes])
            for part, ids, all_ids in zip(self._parts, self._ids, block_ids, strict=True):
                for run in part.runs(all_ids):
                    stream.gather(part.rows[run], part.blocks, ids[run])
            stream.copy(self._host[self._head_bytes : end], self._staged[self._head_bytes : end])
        finally:
            stream.mark().synchronize()

    def write_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """See `PieceBuffer`."""
        state, memory = self._pieces(slot, first, count)
        try:
            self._stream.wait(after)
            self._stream.copy(state, memory[: len(state)])
        finally:
            self._stream.mark().synchronize()

    def read_state(self, slot: int, first: int, count: int, after: Mark) -> None:
        """See `PieceBuffer`."""
        state, memory = self._pieces(slot, first, count)
        memory[len(state) :] = 0
        try:
            self._stream.wait(after)
            self._stream.copy(memory[: len(state)], state)
        finally:
            self._stream.mark().synchronize()

    def _pieces(self, slot: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        assert self._states is not None
        size = self._block_bytes
        return self._states[slot, first * size : (first + count) * size], self._host_rows[:count].view(-1)

    def _put(self, block_ids: list[list[int]]) -> None:
        self._host_ids[:, : len(block_ids[0])] = torch.tensor(block_ids, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Copied:
    blocks: Tensor
    rows: Tensor

    def runs(self, block_ids: list[int]) -> list[slice]:
        """Return slices of rows without `NO_BLOCK`."""
        runs, start = [], 0
        for is_there, run in groupby(block_ids, NO_BLOCK.__ne__):
            end = start + len(list(run))
            if is_there and self.rows.shape[1]:
                runs.append(slice(start, end))
            start = end
        return runs


def create_copy_stream(device: torch.device) -> CopyStream | None:
    """Return a stream, or None for a CPU."""
    return None if device.type == "cpu" else CudaStream(device)


def mark_steps(device: torch.device) -> Mark:
    """Mark all enqueued steps."""
    return Passed() if device.type == "cpu" else CudaQueue().mark()
