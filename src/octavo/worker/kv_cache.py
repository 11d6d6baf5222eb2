"""The KV tensors: one allocation, block after block, so that a block is one contiguous object to copy or send."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from octavo.data.kv_tiers import HOST, TierMove
from octavo.kernels.quantization import KV_SCALE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.data.scheduler_output import BlockCopies

LAYOUT_VERSION = 1  # of the bytes of a block, which stores keep; a block of another version is not found


class PagedKVCache:
    """Keys and values of all layers, [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    dtype: that of the activations, or int8. Then behind the rows of each block, layer and head stand their scales, in
    float32, so that a block is one object all the same. Memory is reserved here, and touched when a block is first
    written or by `octavo.worker.prefault`. num_host_blocks: room in host memory for blocks of preempted requests and
    for evicted ones, in the same layout. num_scratch_blocks: behind the others, for what is guessed; nobody is told of
    them. allocate(num_bytes): where the memory comes from, for a backend that wants it in a certain way.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        num_scratch_blocks: int = 0,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        row_bytes = head_dim + KV_SCALE_BYTES
        rows = (block_size * row_bytes,) if dtype == torch.int8 else (block_size, head_dim)
        shape = (num_layers, 2, num_kv_heads, *rows)
        self.num_blocks = num_blocks
        in_all = num_blocks + num_scratch_blocks
        if allocate is None:
            self.blocks = torch.empty((in_all, *shape), dtype=dtype, device=device)
        else:
            num_bytes = in_all * math.prod(shape) * dtype.itemsize
            self.blocks = allocate(num_bytes).view(dtype).view(in_all, *shape)
        self.host_blocks = torch.empty((num_host_blocks, *shape), dtype=dtype, pin_memory=device.type == "cuda")
        self.block_size = block_size
        rows_alone = self.blocks
        if dtype == torch.int8:
            rows_alone = self.blocks[..., : block_size * head_dim].view(in_all, *shape[:3], block_size, head_dim)
        self._layers = [(rows_alone[:, index, 0], rows_alone[:, index, 1]) for index in range(num_layers)]

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
