"""Lets rank 0 transfer the KV of all ranks between their caches and stores.

Stores keep undivided blocks and undivided recurrent states, with the heads of all ranks. If KV is transferred, each
other rank has its KV cache in memory that rank 0 maps, too. Rank 0's transfer threads copy there directly.
"""

from __future__ import annotations

import mmap
import operator
import os
import time
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.data.scheduler_output import need_parts
from octavo.kv_transfer.stored_states import count_pieces
from octavo.worker.stored_blocks import HostBuffer, HostPart, StatePart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.errors import EngineDeadError
    from octavo.models.architecture import Architecture
    from octavo.models.kv_layout import KVLayout
    from octavo.worker.host_copies import Mark
    from octavo.worker.kv_cache import PagedKVCache

_HEADER_BYTES = 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 2e-3


def create_kv_memory() -> int:
    """Return an inheritable descriptor for `SharedKV`. Raises `OSError`."""
    return os.memfd_create("octavo-kv")


class StepSender(Protocol):
    """The part of `octavo.ranks.leader.Leader` that transfers use."""

    num_steps: int
    timeout_s: float

    def end_of_steps(self) -> EngineDeadError | None:
        """Return an error if no further step is computed."""
        ...

    def declare_dead(self, rank: int) -> EngineDeadError:
        """End all ranks. Return the error to raise."""
        ...


class SharedKV:
    """A rank's KV cache in memory that the rank and rank 0 map.

    memory: from `create_kv_memory`; stays open. group_bytes: size of each KV group.
    """

    def __init__(self, memory: int, group_bytes: Sequence[int]) -> None:
        starts = [_HEADER_BYTES]
        for num_bytes in group_bytes:
            starts.append(starts[-1] + -(-num_bytes // _HEADER_BYTES) * _HEADER_BYTES)
        os.ftruncate(memory, starts[-1])
        self._mapped = mmap.mmap(memory, starts[-1])
        data = np.frombuffer(self._mapped, np.uint8)
        self._copied = data[:8].view(np.int64)
        self.groups = [data[first : first + size] for first, size in zip(starts, group_bytes, strict=False)]
        self._unused = iter([group for group in self.groups if len(group)])

    @classmethod
    def of(
        cls,
        memory: int,
        layout: KVLayout,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: str,
        state_dtype: str,
    ) -> SharedKV:
        """Map the memory for a rank's layout. num_blocks: by KV group. state_dtype: see `PagedKVCache`."""
        sizes = *layout.block_bytes(block_size, dtype), layout.state_bytes(state_dtype)
        return cls(memory, [*map(operator.mul, num_blocks, sizes)])

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of the next KV group that is not empty."""
        group = next(self._unused)
        assert len(group) == num_bytes
        return torch.from_numpy(group)

    @property
    def num_copied_steps(self) -> int:
        """Number of steps with completed block copies."""
        return int(self._copied[0])

    def note_copied(self, num_steps: int) -> None:
        """Record that the block copies of the first steps are done. Only the rank itself calls this."""
        self._copied[0] = num_steps


class BlocksOfRanks:
    """The `TransferredBlocks` of all ranks, for rank 0.

    architecture: rank 0's share. followers: KV of ranks 1, 2, ... leader: sends them the steps.
    """

    def __init__(
        self, architecture: Architecture, kv_cache: PagedKVCache, followers: Sequence[SharedKV], leader: StepSender
    ) -> None:
        assert architecture.whole is not None
        self._followers, self._leader = followers, leader
        self._whole, self._layouts = architecture.whole.kv_layout, [each.kv_layout for each in architecture.ranks]
        self._size = kv_cache.block_size, kv_cache.dtype_name
        group_bytes = self._whole.block_bytes(*self._size)
        self.block_bytes, self.part_bytes = sum(group_bytes), group_bytes[0]
        self._group_starts = [*accumulate(group_bytes, initial=0)]
        self._state_dtype = kv_cache.state_dtype_name
        self.num_state_pieces = count_pieces(self._whole.state_bytes(self._state_dtype), self.block_bytes)
        self._blocks = [[group.blocks.view(torch.uint8).numpy() for group in kv_cache.groups]]
        counts = [len(group.blocks) for group in kv_cache.groups]
        self._blocks += ([*map(_in_rows, each.groups, counts)] for each in followers)

    def make_buffer(self, num_blocks: int) -> HostBuffer:
        """See `TransferredBlocks`."""
        rows = np.empty((num_blocks, self.block_bytes), np.uint8)
        return HostBuffer(rows, [*self._parts(rows)], [*self._state_parts()])

    def _parts(self, rows: NDArray[np.uint8]) -> Iterator[HostPart]:
        """Yield each rank's part of each run of layers that store the same."""
        whole, layouts = self._whole, self._layouts
        columns, *own_columns = (layout.columns(*self._size) for layout in (whole, *layouts))
        for group, (layers, (start, end)) in enumerate(zip(whole.kv_groups, pairwise(self._group_starts), strict=True)):
            stored = rows[:, start:end]
            for _, run in groupby(layers.layers, lambda layer: [each.layers[layer] for each in (whole, *layouts)]):
                same = [*run]
                specs, stored_run = [each.layers[same[0]] for each in layouts], _select(stored, columns, same)
                for rank, (spec, blocks) in enumerate(zip(specs, self._blocks, strict=True)):
                    own_run = _select(blocks[group], own_columns[rank], same)
                    own, part = spec.match(own_run, whole.layers[same[0]], stored_run)
                    yield HostPart(group, own, part, is_repeated=spec in specs[:rank])

    def _state_parts(self) -> Iterator[StatePart]:
        for layout, (*_, slots) in zip(self._layouts, self._blocks, strict=True):
            for own, start, num_bytes in layout.state_runs(self._whole, self._state_dtype):
                yield StatePart(slots[:, own : own + num_bytes], start, num_bytes)

    def mark(self) -> Mark:
        """See `TransferredBlocks`."""
        return _CopiesMark(self._followers, self._leader)

    def wait(self, mark: Mark) -> None:
        """See `TransferredBlocks`."""
        mark.synchronize()

    def need_all(self, block_ids: list[list[int]]) -> list[bool]:
        """See `TransferredBlocks`."""
        return need_parts(block_ids) if len(block_ids) > 1 else [True] * len(block_ids[0])


class _CopiesMark:
    """A mark after the block copies of a step on all ranks. They have computed all earlier steps then."""

    def __init__(self, followers: Sequence[SharedKV], leader: StepSender) -> None:
        self._followers, self._leader, self._num_steps = followers, leader, leader.num_steps

    def synchronize(self) -> None:
        """Wait. Raises `EngineDeadError` if a rank fails, or if it does no copies for too long."""
        pause_s, waited_s = _FIRST_PAUSE_S, 0.0  # without the time in which this process was stopped
        while late := [i for i, each in enumerate(self._followers, 1) if each.num_copied_steps < self._num_steps]:
            if (failure := self._leader.end_of_steps()) is not None:
                raise failure
            if waited_s > self._leader.timeout_s:
                raise self._leader.declare_dead(late[0])
            time.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _in_rows(data: NDArray[np.uint8], num_rows: int) -> NDArray[np.uint8]:
    return data.reshape(num_rows, len(data) // num_rows)


def _select(blocks: NDArray[np.uint8], columns: Mapping[int, slice], layers: Sequence[int]) -> NDArray[np.uint8]:
    """Return a view [num_blocks, num_layers, bytes of a layer]."""
    return blocks[:, columns[layers[0]].start : columns[layers[-1]].stop].reshape(len(blocks), len(layers), -1)
