"""Saves recurrent states, and starts requests with saved states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups.states import StateGroup, borders_to_save
from octavo.core.kv.host_states import HostStates
from octavo.data.events import CheckpointEvicted, CheckpointSaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.core.kv.block_pool import Block, BlockPool
    from octavo.core.kv.prefix_cache import ComputedBlocks, PrefixCache
    from octavo.data.kv_groups import KVGroupSpec
    from octavo.data.request import Request
    from octavo.data.scheduler_output import BlockCopies


class Checkpoints:
    """Recurrent states of requests, and checkpoints, on the device and in host memory.

    interval: See `borders_to_save`, in tokens. copies: Returns the copies of the next step.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        pool: BlockPool,
        block_size: int,
        *,
        interval: int | None,
        copies: Callable[[], BlockCopies],
        emit: Callable[..., None],
    ) -> None:
        self.host = HostStates(spec.num_host_blocks)
        self.group = StateGroup(
            index,
            spec,
            block_size=block_size,
            blocks=pool.blocks,
            on_evict=self._evicted,
            is_in_host=lambda name: self.host.find(name) is not None,
        )
        self.interval = interval
        self._pool = pool
        self._block_size = block_size
        self._copies = copies
        self._emit = emit
        self._cache: PrefixCache

    def attach(self, cache: PrefixCache) -> None:
        """Set the prefix cache that finds the checkpoints' blocks."""
        self._cache = cache

    def find(self, computed: ComputedBlocks) -> tuple[int | None, int | None]:
        """Return the slot of a prefix hit's checkpoint on the device or in host memory, and protect it.

        A checkpoint on the device becomes the last of its worth to be evicted.
        """
        if computed.state_name is None:
            return None, None
        if computed.blocks and not computed.host_blocks:
            slot = self.group.id_of(computed.blocks[-1])
            if slot is not None:
                self.group.renew(computed.blocks[-1])
                return slot, None
        in_host = self.host.find(computed.state_name)
        assert in_host is not None, "a prefix hit does not end at a checkpoint"
        self.host.lend(in_host)
        return None, in_host

    def load(self, request: Request, source: tuple[int | None, int | None]) -> None:
        """Copy a state into a request's slot. source: Slot on the device, and in host memory."""
        (slot,) = request.sequence.block_tables[self.group.index]
        on_device, in_host = source
        if in_host is not None:
            self._copies().swap_in.append((self.group.index, in_host, slot))
        elif on_device not in (None, slot):  # an evicted checkpoint may itself be the request's slot
            self._copies().block_copies.append((self.group.index, on_device, slot))

    def swap_out(self, request: Request) -> int | None:
        """Copy a request's state to host memory. Return its slot there, or None if all slots are taken."""
        in_host = self.host.take()
        if in_host is not None:
            (slot,) = request.sequence.block_tables[self.group.index]
            self._copies().swap_out.append((self.group.index, slot, in_host))
        return in_host

    def block_evicted(self, block: Block) -> None:
        """Keep the checkpoint of a block that host memory keeps."""
        slot = self.group.id_of(block)
        if slot is not None:
            self._keep(block, slot)

    def _evicted(self, block: Block) -> None:
        self._emit(CheckpointEvicted, block.block_id)
        slot = self.group.id_of(block)
        assert slot is not None
        self._keep(block, slot)

    def _keep(self, block: Block, slot: int) -> None:
        assert block.name is not None
        in_host = self.host.keep(block.name)
        if in_host is not None:
            self._copies().swap_out.append((self.group.index, slot, in_host))

    def start(self, request: Request, computed: ComputedBlocks) -> None:
        """Plan the saves of a request that starts."""
        cache = self._cache
        if not cache.is_enabled:
            self.group.begin(request.sequence, computed.num_tokens, [], goes_on=False)
            return
        num_tokens = len(request.sequence.token_ids) if cache.cache_decoded_blocks else request.num_prompt_tokens
        due = borders_to_save(
            num_tokens,
            self._block_size,
            num_found=computed.num_tokens // self._block_size,
            num_shared=computed.num_shared,
            cache_points=request.cache_points,
            interval=None if self.interval is None else max(self.interval // self._block_size, 1),
        )
        self.group.begin(request.sequence, computed.num_tokens, due, goes_on=cache.cache_decoded_blocks)
        cache.announce_checkpoints(request, due)

    def slot_after(self, block_id: int) -> int | None:
        """Return the slot of the checkpoint after a registered block, or None."""
        block = self._pool.findable(block_id)
        return None if block is None else self.group.id_of(block)

    def note_loaded(self, request: Request) -> None:
        """Record that a request's slot has the state after its computed tokens, which a store provided."""
        self.group.note_loaded(request.sequence, request.num_computed_tokens)
        self._cache.end_checkpoints(request, request.num_computed_tokens // self._block_size)

    def plan(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Return the saves of the next step: see `StateGroup.plan_saves`. Copy a loaded state."""
        saves = request.sequence.saves
        if saves.loaded > self._cache.num_committed_blocks(request):
            saves.loaded = 0  # the blocks before the state are not cached
        if saves.loaded:
            copied = self.group.keep_loaded(request.sequence)
            if copied is not None:
                self._copies().block_copies.append((self.group.index, *copied))
        return self.group.plan_saves(request.sequence, num_tokens)

    def commit(self, request: Request) -> list[int]:
        """Make the saves of computed blocks findable. Return their numbers of blocks."""
        num_committed, sequence = self._cache.num_committed_blocks(request), request.sequence
        borders = self.group.commit(sequence, num_committed, self._pool.findable)
        for border in borders:
            self._emit(CheckpointSaved, request.request_id, border * self._block_size)
        self._cache.end_checkpoints(request, num_committed)
        return borders
