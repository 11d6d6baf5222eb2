"""Faults that a simulation injects into the core. No user can cause them, and none of them changes a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.kv.block_pool import Block
    from octavo.core.kv.manager import KVCacheManager


class Faults:
    """What may happen to a scheduler and its KV cache between two steps.

    to_preempt: ids of requests whose blocks the next step takes, if no step is in flight then. A journal keeps them.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.to_preempt: list[str] = []
        self._manager = kv_cache_manager

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Take the blocks of these requests with the next step; they resume by themselves.

        Requests that do not run by then are skipped.
        """
        self.to_preempt += request_ids

    def evict(self, block: Block) -> None:
        """Let a cached block that no request holds lose its content, as if other content needed its room."""
        self._manager.pool.evict(block)

    def replace_weights(self) -> bool:
        """Let no request find KV of the weights so far. Returns False, and changes nothing, while one holds a block."""
        return self._manager.advance_weights_epoch()
