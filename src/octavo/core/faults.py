"""Faults that simulations inject into the scheduler. Faults never change a generated token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.kv.block_pool import Block
    from octavo.core.kv.manager import KVCacheManager


class Faults:
    """Injects faults."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.to_preempt: list[str] = []
        self._manager = kv_cache_manager

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Preempt these requests in the next step if they are running."""
        self.to_preempt += request_ids

    def evict(self, block: Block) -> None:
        """Evict a cached block."""
        self._manager.pool.evict(block)

    def replace_weights(self) -> bool:
        """See `KVCacheManager.advance_weights_epoch`."""
        return self._manager.advance_weights_epoch()
