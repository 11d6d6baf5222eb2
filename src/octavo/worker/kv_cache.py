"""The KV tensors: block after block, and window block after window block, each one contiguous piece to copy or send."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.data.kv_tiers import HOST, TierMove

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.data.scheduler_output import BlockCopies
    from octavo.models.kv_layout import KVLayout, KVShape

# Of the bytes that stores keep of a block: one of another version is not found.
LAYOUT_VERSION, LAYOUT_VERSION_WITH_WINDOWS = 1, 2


class PagedKVCache:
    """Keys and values of all layers: of each block and each window block a row of memory, as `KVLayout` says.

    dtype: that of the activations, or int8 or float8_e4m3fn. Then behind the rows of each block, layer and head stand
    their scales, in float32, so that a block is one object all the same. Memory is reserved here, and touched when a
    block is first written or by `octavo.worker.prefault`. num_window_blocks: 0 where no layer has a window.
    num_host_blocks: room in host memory for blocks of preempted requests and for evicted ones, in the same layout; each
    has room for a window block as well. num_scratch_blocks: behind the others, for what is guessed, of both; nobody is
    told of them. allocate(num_bytes): where the memory comes from, for a backend that wants it in a certain way.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_window_blocks: int = 0,
        num_host_blocks: int = 0,
        num_scratch_blocks: int = 0,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        assert (num_window_blocks > 0) == (layout.window is not None)
        self.num_blocks, self.num_window_blocks = num_blocks, num_window_blocks
        self.block_size, self.window = block_size, layout.window
        kind = str(dtype).removeprefix("torch.")
        make = partial(_reserve, dtype=dtype, device=device, allocate=allocate)
        self.blocks = make(num_blocks + num_scratch_blocks, layout.block_bytes(block_size, kind))
        self.window_blocks = make(num_window_blocks + num_scratch_blocks, layout.window_block_bytes(block_size, kind))
        self.host_blocks, self.host_window_blocks = (
            torch.empty((num_host_blocks, each.shape[1]), dtype=dtype, pin_memory=device.type == "cuda")
            for each in (self.blocks, self.window_blocks)
        )
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for blocks, numbers in ((self.blocks, layout.in_blocks), (self.window_blocks, layout.in_window_blocks)):
            start = 0
            for number in numbers:
                shape = layout.layers[number]
                end = start + shape.block_bytes(block_size, kind) // dtype.itemsize
                self._layers[number] = _keys_and_values(blocks[:, start:end], shape, block_size)
                start = end

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self.host_blocks.shape[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.blocks.shape[1] * self.blocks.itemsize

    @property
    def window_block_bytes(self) -> int:
        """Bytes of one window block; 0 where no layer has a window."""
        return self.window_blocks.shape[1] * self.window_blocks.itemsize

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of one block in host memory and in stores: those of a block, then those of a window block."""
        return self.block_bytes + self.window_block_bytes

    @property
    def memory(self) -> list[Tensor]:
        """What is reserved on the device."""
        return [each for each in (self.blocks, self.window_blocks) if each.nbytes]

    @property
    def num_bytes(self) -> int:
        """Bytes reserved on the device."""
        return sum(each.nbytes for each in self.memory)

    @property
    def summary(self) -> str:
        """Return its blocks, for the log."""
        of_windows = f", {self.num_window_blocks} window blocks of layers that see {self.window} tokens"
        return f"{self.num_blocks} blocks{'' if self.window is None else of_windows}"

    @property
    def layout_version(self) -> int:
        """What of the layout decides which bytes stores keep under a key."""
        return LAYOUT_VERSION if self.window is None else LAYOUT_VERSION_WITH_WINDOWS

    def copy(self, copies: BlockCopies) -> tuple[TierMove, ...]:
        """Copy whole blocks, bit for bit, in the order that `BlockCopies` states.

        Mutates blocks, window blocks and those in host memory.

        Return what went to host memory and what came back, if anything did.
        """
        start = time.perf_counter()
        for block, host in copies.swap_out:
            self.host_blocks[host].copy_(self.blocks[block])
        for block, host in copies.window_swap_out:
            self.host_window_blocks[host].copy_(self.window_blocks[block])
        saved = time.perf_counter()
        for source, target in copies.block_copies:
            self.blocks[target].copy_(self.blocks[source])
        for source, target in copies.window_copies:
            self.window_blocks[target].copy_(self.window_blocks[source])
        goes_out, comes_in = copies.swap_out or copies.window_swap_out, copies.swap_in or copies.window_swap_in
        if not (goes_out or comes_in):
            return ()
        loading = time.perf_counter()
        for host, block in copies.swap_in:
            self.blocks[block].copy_(self.host_blocks[host])
        for host, block in copies.window_swap_in:
            self.window_blocks[block].copy_(self.host_window_blocks[host])
        loaded = time.perf_counter()
        return (
            self._host_move(copies.swap_out, copies.window_swap_out, saved - start),
            self._host_move(copies.swap_in, copies.window_swap_in, loaded - loading),
        )

    def _host_move(
        self, blocks: list[tuple[int, int]], window_blocks: list[tuple[int, int]], seconds: float
    ) -> TierMove:
        num_bytes = len(blocks) * self.block_bytes + len(window_blocks) * self.window_block_bytes
        return TierMove(HOST, len(blocks), num_bytes, seconds if blocks or window_blocks else 0.0)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k_cache, v_cache) of a layer: views [blocks, num_kv_heads, block_size, head_dim].

        blocks: window blocks for a layer with a window.
        """
        return self._layers[index]


def _reserve(
    num_blocks: int,
    block_bytes: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Callable[[int], Tensor] | None,
) -> Tensor:
    """Return memory of undefined content: [num_blocks, block_bytes / the bytes of a number]."""
    shape = (num_blocks, block_bytes // dtype.itemsize)
    if allocate is None or not block_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(num_blocks * block_bytes).view(dtype).view(shape)


def _keys_and_values(part: Tensor, shape: KVShape, block_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values without scales: views of a layer's part of all blocks."""
    num_blocks, num_heads, head_dim = part.shape[0], shape.num_kv_heads, shape.head_dim
    heads = part.view(num_blocks, 2, num_heads, part.shape[1] // (2 * num_heads))
    rows = heads[..., : block_size * head_dim].view(num_blocks, 2, num_heads, block_size, head_dim)
    return rows[:, 0], rows[:, 1]
