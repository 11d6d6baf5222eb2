"""Faults that a simulation injects into the core. No user can cause them, and none of them changes a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.kv.block_pool import Block
    from octavo.core.kv.manager import KVCacheManager


class Faults:
    """Injects faults into a scheduler and its KV cache between two steps.

    to_preempt: ids of requests that the next step preempts, if no step is in flight then. Journals record them.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.to_preempt: list[str] = []
        self._manager = kv_cache_manager

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Preempt these requests with the next step; they resume by themselves.

        Requests that do not run then are skipped.
        """
        self.to_preempt += request_ids

    def evict(self, block: Block) -> None:
        """Evict a cached block, which must not be held."""
        self._manager.pool.evict(block)

    def replace_weights(self) -> bool:
        """Discard all KV of the weights so far. Returns False with nothing changed while a block is held."""
        return self._manager.advance_weights_epoch()
