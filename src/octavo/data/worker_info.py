"""A worker's start report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.data.kv_groups import RecurrentStates

if TYPE_CHECKING:
    from octavo.config import ResolvedSchedulerConfig
    from octavo.data.kv_groups import KVGroupSpec


@dataclass(frozen=True, slots=True)
class KVGroupInfo:
    """A KV group.

    block_bytes: bytes of a block on all ranks together. stored_bytes: bytes of a block in stores.
    """

    spec: KVGroupSpec
    block_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's formats and sizes after loading."""

    device: str  # "cpu" or "cuda"
    machine: str  # GPU's name, or the CPU's instruction sets as torch names them
    kernels: str
    kernel_layout: str | None  # of packed weights
    dtype: str  # of activations
    kv_dtype: str
    scheduler_config: ResolvedSchedulerConfig  # with limits that fit the memory
    block_size: int
    kv_groups: tuple[KVGroupInfo, ...]
    num_host_blocks: int
    draft_block_bytes: int  # of a draft model, for one block of the first group
    kv_cache_bytes: int
    kv_layout_version: int  # of blocks in stores
    num_warm_up_tokens: int
    draft_summary: str | None

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first KV group."""
        return self.kv_groups[0].spec.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes per block of the first group."""
        return self.kv_groups[0].block_bytes

    @property
    def bounded_groups(self) -> list[KVGroupSpec]:
        """All KV groups except the first."""
        return [group.spec for group in self.kv_groups[1:]]

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit the first KV group."""
        return self.num_blocks * self.block_size

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of a block in stores, which has all groups except recurrent states."""
        return sum(group.stored_bytes for group in self.kv_groups) - self.stored_state_bytes

    @property
    def stored_state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states in stores."""
        last = self.kv_groups[-1]
        return last.stored_bytes if isinstance(last.spec.kind, RecurrentStates) else 0

    @property
    def stored_part_bytes(self) -> int:
        """Bytes of the first group's part of a block in stores."""
        return self.kv_groups[0].stored_bytes

    @property
    def kv_cache_summary(self) -> str:
        """Blocks by KV group, for a log line."""
        others = (f", {spec.num_blocks} of {spec.kind}" for spec in self.bounded_groups)
        return f"{self.num_blocks} blocks{''.join(others)}"
