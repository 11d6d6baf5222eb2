"""Saves recurrent states, and starts requests with saved states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups.states import borders_to_save
from octavo.data.events import CheckpointSaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.core.kv.block_pool import BlockPool
    from octavo.core.kv.groups import StateGroup
    from octavo.core.kv.prefix_cache import ComputedBlocks, PrefixCache
    from octavo.data.request import Request


class Checkpoints:
    """The checkpoints of a `StateGroup`. interval: See `borders_to_save`, in tokens."""

    def __init__(
        self,
        group: StateGroup,
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
        *,
        interval: int | None,
        emit: Callable[..., None],
    ) -> None:
        self.group = group
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self.interval = interval
        self._emit = emit

    def find(self, computed: ComputedBlocks) -> int | None:
        """Return the slot of the checkpoint at the end of a prefix hit. Make it the last of its worth to be evicted."""
        if not computed.blocks:
            return None
        self.group.renew(computed.blocks[-1])
        slot = self.group.id_of(computed.blocks[-1])
        assert slot is not None, "a prefix hit does not end at a checkpoint"
        return slot

    def start(self, request: Request, computed: ComputedBlocks) -> None:
        """Plan the saves of a request that starts."""
        cache = self._cache
        if not cache.is_enabled:
            return
        num_tokens = len(request.sequence.token_ids) if cache.cache_decoded_blocks else request.num_prompt_tokens
        due = borders_to_save(
            num_tokens,
            self._block_size,
            num_found=len(computed.blocks),
            num_shared=computed.num_shared,
            cache_points=request.cache_points,
            interval=None if self.interval is None else max(self.interval // self._block_size, 1),
        )
        self.group.begin(request.sequence, len(computed.blocks), due, goes_on=cache.cache_decoded_blocks)
        cache.announce_checkpoints(request, due)

    def plan(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Return the saves of the next step: see `StateGroup.plan_saves`."""
        return self.group.plan_saves(request.sequence, num_tokens)

    def commit(self, request: Request) -> None:
        """Make the saves of computed blocks findable."""
        num_committed, sequence = self._cache.num_committed_blocks(request), request.sequence
        for border in self.group.commit(sequence, num_committed, self._pool.findable):
            self._emit(CheckpointSaved, request.request_id, border * self._block_size)
        self._cache.end_checkpoints(request, num_committed)
