"""The KV tensors: one allocation, block after block, so that a block is one contiguous object to copy or send."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from octavo.data.kv_tiers import HOST, TierMove

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.data.scheduler_output import BlockCopies
    from octavo.models.kv_layout import KVLayout, KVShape

LAYOUT_VERSION = 1  # of the bytes of a block, which stores keep; a block of another version is not found


class PagedKVCache:
    """Keys and values of all layers: of each block a row of memory, in which they stand as `KVLayout` says.

    dtype: that of the activations, or int8. Then behind the rows of each block, layer and head stand their scales, in
    float32, so that a block is one object all the same. Memory is reserved here, and touched when a block is first
    written or by `octavo.worker.prefault`. num_host_blocks: room in host memory for blocks of preempted requests and
    for evicted ones, in the same layout. num_scratch_blocks: behind the others, for what is guessed; nobody is told of
    them. allocate(num_bytes): where the memory comes from, for a backend that wants it in a certain way.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        num_scratch_blocks: int = 0,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        offsets = layout.offsets(block_size, str(dtype).removeprefix("torch."))
        starts = [offset // dtype.itemsize for offset in offsets]
        shape = (num_blocks + num_scratch_blocks, starts[-1])
        self.num_blocks = num_blocks
        if allocate is None:
            self.blocks = torch.empty(shape, dtype=dtype, device=device)
        else:
            self.blocks = allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.host_blocks = torch.empty((num_host_blocks, shape[1]), dtype=dtype, pin_memory=device.type == "cuda")
        self.block_size = block_size
        self._layers = [
            _keys_and_values(self.blocks[:, start:end], each, block_size)
            for each, start, end in zip(layout.layers, starts[:-1], starts[1:], strict=True)
        ]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self.host_blocks.shape[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.blocks[0].nbytes

    @property
    def num_bytes(self) -> int:
        """Bytes reserved on the device."""
        return self.blocks.nbytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, on the device and in host memory."""
        return self.blocks[0].nbytes

    def copy(self, copies: BlockCopies) -> tuple[TierMove, ...]:
        """Copy whole blocks, bit for bit, in the order that `BlockCopies` states (mutates blocks and host_blocks).

        Return what went to host memory and what came back, if anything did.
        """
        start = time.perf_counter()
        for block, host in copies.swap_out:
            self.host_blocks[host].copy_(self.blocks[block])
        saved = time.perf_counter()
        for source, target in copies.block_copies:
            self.blocks[target].copy_(self.blocks[source])
        if not (copies.swap_out or copies.swap_in):
            return ()
        loading = time.perf_counter()
        for host, block in copies.swap_in:
            self.blocks[block].copy_(self.host_blocks[host])
        num_out, num_in, size = len(copies.swap_out), len(copies.swap_in), self.block_bytes
        return (
            TierMove(HOST, num_out, num_out * size, saved - start if num_out else 0.0),
            TierMove(HOST, num_in, num_in * size, time.perf_counter() - loading if num_in else 0.0),
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k_cache, v_cache) of a layer: views [blocks, num_kv_heads, block_size, head_dim]."""
        return self._layers[index]


def _keys_and_values(part: Tensor, shape: KVShape, block_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values without the scales of int8: views of a layer's part of all blocks."""
    num_blocks, num_heads, head_dim = part.shape[0], shape.num_kv_heads, shape.head_dim
    heads = part.view(num_blocks, 2, num_heads, part.shape[1] // (2 * num_heads))
    rows = heads[..., : block_size * head_dim].view(num_blocks, 2, num_heads, block_size, head_dim)
    return rows[:, 0], rows[:, 1]
