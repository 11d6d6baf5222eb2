"""The tensors of the KV cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from octavo.data.kv_groups import RecurrentStates
from octavo.data.kv_tiers import HOST, TierMove
from octavo.worker.pinned_memory import pinned_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.scheduler_output import BlockCopies
    from octavo.models.kv_layout import KVLayout

# Version of stored blocks. Each KV group after the first adds 1. Stores ignore other versions.
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A KV group's memory, a row per block. Scratch blocks are last."""

    kind: KVGroupKind
    num_blocks: int
    blocks: Tensor
    host_blocks: Tensor

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.blocks.shape[1] * self.blocks.itemsize


class TimeMark(Protocol):
    """A time in a device's queue."""

    def elapsed_time(self, end: Any) -> float:
        """Return milliseconds until a later mark. The device must have reached both marks."""
        ...


@dataclass(frozen=True, slots=True)
class _Now:
    seconds: float

    def elapsed_time(self, end: _Now) -> float:
        """Return milliseconds."""
        return 1000 * (end.seconds - self.seconds)


class PagedKVCache:
    """Keys and values of all layers; see `KVLayout`.

    dtype: int8, float8_e4m3fn, or the activations' dtype. With int8 and float8_e4m3fn, float32 scales follow each
    head's rows in a block. num_host_blocks: each group's number of blocks in host memory. num_scratch_blocks:
    additional blocks of each group, which the scheduler does not use. num_kept_rows: of recurrent layers.
    num_host_states: recurrent states in host memory. state_dtype: of activations.

    If layers have recurrent states, they are the last group: a block has the states of all layers.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        num_scratch_blocks: int = 0,
        num_kept_rows: int = 0,
        num_host_states: int = 0,
        state_dtype: torch.dtype = torch.float32,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.block_size, self.device, self.num_host_blocks = block_size, device, num_host_blocks
        self.num_kept_rows = num_kept_rows if layout.states else 0
        self.dtype_name = kind = str(dtype).removeprefix("torch.")
        self.state_dtype_name = str(state_dtype).removeprefix("torch.")
        self.groups: list[GroupMemory] = []
        self._layers: dict[int, tuple[Tensor, ...]] = dict.fromkeys(range(len(layout.layers)), ())
        each_bytes, columns = layout.block_bytes(block_size, kind), layout.columns(block_size, kind)
        for group, count, block_bytes in zip(layout.kv_groups, num_blocks, each_bytes, strict=False):
            assert count > 0
            blocks = _reserve(count + num_scratch_blocks, block_bytes, dtype=dtype, device=device, allocate=allocate)
            host_blocks = _reserve_host(num_host_blocks, block_bytes, dtype=dtype, device=device)
            self.groups.append(GroupMemory(group.kind, count, blocks, host_blocks))
            for number in group.layers:
                start, end = (each // dtype.itemsize for each in (columns[number].start, columns[number].stop))
                self._layers[number] = layout.layers[number].views(blocks[:, start:end], block_size)
        if layout.states:
            num_slots = num_blocks[-1] + num_scratch_blocks
            states, layers = make_states(layout, num_slots, num_kept_rows, state_dtype, device, allocate)
            in_host = _reserve_host(num_host_states, states.shape[1], dtype=torch.uint8, device=device)
            self.groups.append(GroupMemory(RecurrentStates(), num_blocks[-1], states, in_host))
            self._layers |= layers
        for number, spec in enumerate(layout.layers):
            if spec.shared_layer is not None:
                self._layers[number] = self._layers[spec.shared_layer]

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self.groups[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes per block of group 0."""
        return self.groups[0].block_bytes

    @property
    def stored_block_bytes(self) -> int:
        """A stored block's bytes."""
        return sum(group.block_bytes for group in self.groups_of_tokens)

    @property
    def groups_of_tokens(self) -> list[GroupMemory]:
        """The groups with blocks of tokens."""
        return [group for group in self.groups if not isinstance(group.kind, RecurrentStates)]

    @property
    def states(self) -> Tensor | None:
        """Recurrent states, uint8 [num_slots, bytes of a sequence's states], or None."""
        return self.groups[-1].blocks if isinstance(self.groups[-1].kind, RecurrentStates) else None

    @property
    def memory(self) -> list[Tensor]:
        """Device tensors."""
        return [group.blocks for group in self.groups if group.blocks.nbytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of `memory`."""
        return sum(each.nbytes for each in self.memory)

    def copy(self, copies: BlockCopies) -> Callable[[], tuple[TierMove, ...]]:
        """Enqueue copies of whole blocks, in the order of `BlockCopies`.

        Returns a function to call after the copies have ended. It returns the moves to and from host memory.
        """
        if not copies:
            return _no_moves
        groups, start = self.groups, time_mark(self.device)
        for group, block, host in copies.swap_out:
            groups[group].host_blocks[host].copy_(groups[group].blocks[block], non_blocking=True)
        saved = time_mark(self.device)
        for group, source, target in copies.block_copies:
            groups[group].blocks[target].copy_(groups[group].blocks[source])
        if not (copies.swap_out or copies.swap_in):
            return _no_moves
        loading = time_mark(self.device)
        for group, host, block in copies.swap_in:
            groups[group].blocks[block].copy_(groups[group].host_blocks[host], non_blocking=True)
        return partial(self._host_moves, copies, (start, saved, loading, time_mark(self.device)))

    def _host_moves(self, copies: BlockCopies, times: tuple[TimeMark, ...]) -> tuple[TierMove, ...]:
        start, saved, loading, loaded = times
        saving_s, loading_s = start.elapsed_time(saved) / 1000, loading.elapsed_time(loaded) / 1000
        return self._host_move(copies.swap_out, saving_s), self._host_move(copies.swap_in, loading_s)

    def _host_move(self, moved: list[tuple[int, int, int]], seconds: float) -> TierMove:
        num_blocks = sum(group == 0 for group, _, _ in moved)
        num_bytes = sum(self.groups[group].block_bytes for group, _, _ in moved)
        return TierMove(HOST, num_blocks, num_bytes, seconds if moved else 0.0)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """See `CacheSpec.views`."""
        return self._layers[index]


def make_states(
    layout: KVLayout,
    num_slots: int,
    num_kept_rows: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    allocate: Callable[[int], Tensor] | None = None,
) -> tuple[Tensor, dict[int, tuple[Tensor, ...]]]:
    """Allocate recurrent states, all zero: uint8 [num_slots, bytes of a sequence's states].

    Also return each layer's views of the states, followed by its kept rows. dtype: of activations.
    """
    name = str(dtype).removeprefix("torch.")
    memory = _reserve(num_slots, layout.state_bytes(name), dtype=torch.uint8, device=device, allocate=allocate).zero_()
    layers: dict[int, tuple[Tensor, ...]] = {}
    start = 0
    for number, spec in layout.states.items():
        end = start + spec.slot_bytes(name)
        kept = torch.empty(num_kept_rows, spec.kept_width, dtype=dtype, device=device)
        layers[number] = (*spec.slot_views(memory[:, start:end], dtype, torch.float32), kept)
        start = end
    return memory, layers


def time_mark(device: torch.device) -> TimeMark:
    """Return a mark after all work enqueued so far. On a CPU, the mark is the time."""
    if device.type == "cpu":
        return _Now(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    mark: TimeMark = event
    return mark


def _no_moves() -> tuple[TierMove, ...]:
    return ()


def _reserve_host(num_blocks: int, block_bytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (num_blocks, block_bytes // dtype.itemsize)
    if device.type == "cpu":
        return torch.empty(shape, dtype=dtype)
    return pinned_memory(num_blocks * block_bytes).view(dtype).view(shape)


def _reserve(
    num_blocks: int,
    block_bytes: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    allocate: Callable[[int], Tensor] | None,
) -> Tensor:
    shape = (num_blocks, block_bytes // dtype.itemsize)
    if allocate is None or not block_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(num_blocks * block_bytes).view(dtype).view(shape)
