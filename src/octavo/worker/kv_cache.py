"""The KV tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.data.kv_tiers import HOST, TierMove

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.scheduler_output import BlockCopies
    from octavo.models.kv_layout import KVLayout

# Version of a stored block's bytes; each KV group after the first adds 1. Stores do not find blocks of another version.
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A KV group's memory, a row for each block, scratch blocks last."""

    kind: KVGroupKind
    num_blocks: int
    blocks: Tensor
    host_blocks: Tensor

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.blocks.shape[1] * self.blocks.itemsize


class PagedKVCache:
    """Keys and values of all layers: a contiguous row of memory for each block of each KV group, as `KVLayout` says.

    dtype: that of the activations, or int8 or float8_e4m3fn. Rounded rows of each block, layer and head are followed by
    their scales in float32, so that a block stays one piece. num_host_blocks: each has room for the block of every
    group. num_scratch_blocks: further blocks of each group, unknown to the scheduler.

    Memory is touched when a block is first written or by `octavo.worker.prefault`.
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
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.block_size, self.device, self.num_host_blocks = block_size, device, num_host_blocks
        kind = str(dtype).removeprefix("torch.")
        self.groups: list[GroupMemory] = []
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        each_bytes = layout.block_bytes(block_size, kind)
        for group, count, block_bytes in zip(layout.kv_groups, num_blocks, each_bytes, strict=True):
            assert count > 0
            blocks = _reserve(count + num_scratch_blocks, block_bytes, dtype=dtype, device=device, allocate=allocate)
            host_shape = (num_host_blocks, blocks.shape[1])
            host_blocks = torch.empty(host_shape, dtype=dtype, pin_memory=device.type == "cuda")
            self.groups.append(GroupMemory(group.kind, count, blocks, host_blocks))
            start = 0
            for number in group.layers:
                spec = layout.layers[number]
                end = start + spec.block_bytes(block_size, kind) // dtype.itemsize
                self._layers[number] = spec.views(blocks[:, start:end], block_size)
                start = end
        for number, spec in enumerate(layout.layers):
            if spec.shared_layer is not None:
                self._layers[number] = self._layers[spec.shared_layer]

    @property
    def num_blocks(self) -> int:
        """The first group's."""
        return self.groups[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """The first group's."""
        return self.groups[0].block_bytes

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of one block in host memory and in stores: all groups."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def memory(self) -> list[Tensor]:
        """The reserved device tensors."""
        return [group.blocks for group in self.groups if group.blocks.nbytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of `memory`."""
        return sum(each.nbytes for each in self.memory)

    def copy(self, copies: BlockCopies) -> tuple[TierMove, ...]:
        """Copy whole blocks, in the order that `BlockCopies` states.

        Returns the moves to and from host memory, or nothing.
        """
        groups, start = self.groups, time.perf_counter()
        for group, block, host in copies.swap_out:
            groups[group].host_blocks[host].copy_(groups[group].blocks[block])
        saved = time.perf_counter()
        for group, source, target in copies.block_copies:
            groups[group].blocks[target].copy_(groups[group].blocks[source])
        if not (copies.swap_out or copies.swap_in):
            return ()
        loading = time.perf_counter()
        for group, host, block in copies.swap_in:
            groups[group].blocks[block].copy_(groups[group].host_blocks[host])
        loaded = time.perf_counter()
        return self._host_move(copies.swap_out, saved - start), self._host_move(copies.swap_in, loaded - loading)

    def _host_move(self, moved: list[tuple[int, int, int]], seconds: float) -> TierMove:
        num_blocks = sum(group == 0 for group, _, _ in moved)
        num_bytes = sum(self.groups[group].block_bytes for group, _, _ in moved)
        return TierMove(HOST, num_blocks, num_bytes, seconds if moved else 0.0)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return its views."""
        return self._layers[index]


def _reserve(
    num_blocks: int,
    block_bytes: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Callable[[int], Tensor] | None,
) -> Tensor:
    """Return uninitialized memory."""
    shape = (num_blocks, block_bytes // dtype.itemsize)
    if allocate is None or not block_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(num_blocks * block_bytes).view(dtype).view(shape)
