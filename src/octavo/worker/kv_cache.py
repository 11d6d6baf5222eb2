"""The KV tensors: one allocation, block after block, so that a block is one contiguous object to copy or send."""

from __future__ import annotations

import torch


class PagedKVCache:
    """Keys and values of all layers, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    Memory is reserved here and touched when a block is first written.
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
    ) -> None:
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self._layers = [(self.blocks[:, index, 0], self.blocks[:, index, 1]) for index in range(num_layers)]

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.blocks.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return self.blocks.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k_cache, v_cache) of a layer: views [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self._layers[index]
