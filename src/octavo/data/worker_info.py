"""The report of a worker after it has loaded its weights and planned its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import SchedulerConfig
    from octavo.data.kv_groups import KVGroupSpec


@dataclass(frozen=True, slots=True)
class KVGroupInfo:
    """A KV group, and the bytes of one of its blocks."""

    spec: KVGroupSpec
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The formats and the sizes of one worker, for the core, the server and the log. Plain data.

    device: "cpu" or "cuda". machine: name of the GPU, or the instruction sets of the processor as torch names them.
    kernels, kernel_layout: identity of the kernels, and the layout into which they pack weights; None if it has none.
    dtype, kv_dtype: of activations, and of keys and values. scheduler_config: the configured one, with steps limited to
    those that fit into memory. kv_groups: the KV groups of the cache. num_host_blocks: number of host blocks.
    draft_block_bytes: bytes of a draft model's keys and values for one block of the first group. kv_cache_bytes: bytes
    that the KV cache reserves on the device. kv_layout_version: version of the bytes that stores keep under a key.
    num_warm_up_tokens: length of the prompt that is computed at the start. draft_summary: one line about the draft
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
    kv_groups: tuple[KVGroupInfo, ...]
    num_host_blocks: int
    draft_block_bytes: int
    kv_cache_bytes: int
    kv_layout_version: int
    num_warm_up_tokens: int
    draft_summary: str | None

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first KV group."""
        return self.kv_groups[0].spec.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the first KV group."""
        return self.kv_groups[0].block_bytes

    @property
    def bounded_groups(self) -> list[KVGroupSpec]:
        """All KV groups except the first."""
        return [group.spec for group in self.kv_groups[1:]]

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that fit into the KV cache."""
        return self.num_blocks * self.block_size

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of one block in host memory and in stores: a block of every group, one after the other."""
        return sum(group.block_bytes for group in self.kv_groups)

    @property
    def kv_cache_summary(self) -> str:
        """The blocks of the KV cache, for the log."""
        others = (f", {spec.num_blocks} of {spec.kind}" for spec in self.bounded_groups)
        return f"{self.num_blocks} blocks{''.join(others)}"
