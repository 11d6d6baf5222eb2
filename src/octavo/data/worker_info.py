"""What a worker reports after it has loaded its weights and planned its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The formats and the sizes of one worker, for the core, the server and the log. Plain data.

    device: "cpu" or "cuda". machine: name of the GPU, or the instruction sets of the processor as torch names them.
    kernels, kernel_layout: identity of the kernels, and the layout into which they pack weights; None if it has none.
    dtype, kv_dtype: of activations, and of keys and values. scheduler_config: as asked for, but with steps that fit
    into memory. num_blocks, num_window_blocks, num_host_blocks: of the KV cache and of host memory; num_window_blocks
    is 0 and window is None if no layer has a window. block_bytes, window_block_bytes, draft_block_bytes: of one block,
    of one window block, and of the keys and values that a drafting model keeps with one block. kv_cache_bytes: all
    that the KV cache reserves on the device. kv_layout_version: version of the bytes that stores keep under a key.
    num_warm_up_tokens: length of the prompt that is computed at the start. draft_summary: one line about the drafting
    model for the log; None if there is none.
    """

    device: str
    machine: str
    kernels: str
    kernel_layout: str | None
    dtype: str
    kv_dtype: str
    scheduler_config: SchedulerConfig
    block_size: int
    num_blocks: int
    num_window_blocks: int
    num_host_blocks: int
    window: int | None
    block_bytes: int
    window_block_bytes: int
    draft_block_bytes: int
    kv_cache_bytes: int
    kv_layout_version: int
    num_warm_up_tokens: int
    draft_summary: str | None

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of one block in host memory and in stores: those of a block, then those of a window block."""
        return self.block_bytes + self.window_block_bytes

    @property
    def kv_cache_summary(self) -> str:
        """The blocks of the KV cache, for the log."""
        of_windows = f", {self.num_window_blocks} window blocks of layers that see {self.window} tokens"
        return f"{self.num_blocks} blocks{'' if self.window is None else of_windows}"
