"""An engine's effective limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.data.fingerprint import EngineFingerprint  # noqa: TC001 - msgspec reads this type
from octavo.data.kv_groups import RecurrentStates, SlidingWindow
from octavo.data.state_slots import StateSlots

if TYPE_CHECKING:
    from octavo.config import CacheConfig, ResolvedSchedulerConfig, SpeculativeConfig


@dataclass(frozen=True, slots=True)
class KVGroupCapacity:
    """A bounded KV group's capacity."""

    kind: str
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The effective limits, possibly below the configuration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    num_gpu_blocks: int  # of the first KV group
    num_cpu_blocks: int  # in host memory
    block_size: int
    kv_cache_dtype: str
    enable_prefix_caching: bool
    speculative_method: str = "none"
    num_speculative_tokens: int = 0
    kv_block_bytes: int = 0  # of the first KV group, including a draft model's KV
    bounded_groups: tuple[KVGroupCapacity, ...] = ()
    role: str = "both"
    kv_transfer_port: int | None = None  # of a prefill engine
    kv_format: dict[str, str] | None = None  # all properties on which transferred KV depends, except tokens
    fingerprint: EngineFingerprint | None = None

    @classmethod
    def of(
        cls,
        scheduler: ResolvedSchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        kv_cache_dtype: str = "auto",
        speculative: SpeculativeConfig | None = None,
        kv_block_bytes: int = 0,
        bounded_groups: tuple[KVGroupCapacity, ...] = (),
        role: str = "both",
        kv_transfer_port: int | None = None,
        kv_format: dict[str, str] | None = None,
        fingerprint: EngineFingerprint | None = None,
    ) -> EngineCapacity:
        """Derive the limits from configuration and memory."""
        num_tokens = num_blocks * cache.block_size
        largest_step = min(scheduler.max_num_batched_tokens, num_tokens)
        prefill, total = scheduler.max_batch_prefill_tokens, scheduler.max_batch_total_tokens
        return cls(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            async_scheduling=scheduler.async_scheduling,
            max_batch_prefill_tokens=largest_step if prefill is None else min(prefill, largest_step),
            max_batch_total_tokens=num_tokens if total is None else min(total, num_tokens),
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=num_host_blocks,
            block_size=cache.block_size,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=cache.enable_prefix_caching,
            speculative_method="none" if speculative is None else speculative.method,
            num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
            kv_block_bytes=kv_block_bytes,
            bounded_groups=bounded_groups,
            role=role,
            kv_transfer_port=kv_transfer_port,
            kv_format=kv_format,
            fingerprint=fingerprint,
        )

    @property
    def num_window_blocks(self) -> int:
        """Blocks of all sliding-window groups."""
        return sum(each.num_blocks for each in self.bounded_groups if each.kind == SlidingWindow.name)

    @property
    def empty_states(self) -> StateSlots | None:
        """Slots of recurrent states before the first request, or None without recurrent layers."""
        sizes = [each.num_blocks for each in self.bounded_groups if each.kind == RecurrentStates.name]
        return StateSlots(0, 0, *sizes) if sizes else None

    @property
    def summary(self) -> str:
        """Limits in tokens, for a log line."""
        names = ("kv_cache_tokens", "max_batch_total_tokens", "max_batch_prefill_tokens", "max_num_batched_tokens")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit the first KV group."""
        return self.num_gpu_blocks * self.block_size
