"""Assigns KV blocks to requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.event_emitter import emit_nothing
from octavo.core.kv.block_chains import BlockChains
from octavo.core.kv.block_pool import Block, BlockLink, BlockPool
from octavo.core.kv.cache_history import MOST_REMEMBERED, CacheHistory
from octavo.core.kv.cache_listener import NO_LISTENER
from octavo.core.kv.checkpoints import Checkpoints
from octavo.core.kv.groups import BoundedGroup, FullAttentionGroup, StateGroup, num_covered
from octavo.core.kv.host_block_pool import HostBlockPool
from octavo.core.kv.prefix_cache import NO_COMPUTED_BLOCKS, ComputedBlocks, PrefixCache
from octavo.data import events
from octavo.data.kv_groups import NO_BLOCK, RecurrentStates
from octavo.data.scheduler_output import BlockCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.core.kv.cache_listener import CacheListener
    from octavo.core.kv.groups import Claim, KVGroup
    from octavo.data.kv_groups import KVGroupSpec
    from octavo.data.request import Request
    from octavo.data.request import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class _Saved:
    host_blocks: list[int]
    num_tokens: int
    state: int | None = None  # slot in host memory


class KVCacheManager:
    """Allocates blocks of `block_size` tokens. An allocation succeeds in all KV groups or in none.

    num_blocks: Number of blocks of the first KV group. bounded_groups: The other groups. Recurrent states are last.
    checkpoint_interval: See `borders_to_save`, in tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        bounded_groups: Sequence[KVGroupSpec] = (),
        enable_prefix_caching: bool = True,
        cache_decoded_blocks: bool = True,
        num_host_blocks: int = 0,
        max_step_tokens: int = 1,
        extra_keys: tuple[str, ...] = (),
        checkpoint_interval: int | None = None,
        emit: Callable[..., None] = emit_nothing,
        listener: CacheListener = NO_LISTENER,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self._evicted, self._forgotten, listener)
        self.host = HostBlockPool(num_host_blocks, emit, listener)
        self.bounded = [
            BoundedGroup(
                index,
                spec,
                block_size=block_size,
                max_step_tokens=max_step_tokens,
                blocks=self.pool.blocks,
                on_evict=self._keep_in_host,
            )
            for index, spec in enumerate(bounded_groups, 1)
            if not isinstance(spec.kind, RecurrentStates)
        ]
        self.groups: list[KVGroup] = [FullAttentionGroup(self.pool), *self.bounded]
        self.checkpoints: Checkpoints | None = None
        if bounded_groups and isinstance(bounded_groups[-1].kind, RecurrentStates):
            self.checkpoints = Checkpoints(
                len(bounded_groups),
                bounded_groups[-1],
                self.pool,
                block_size,
                interval=checkpoint_interval,
                copies=lambda: self._copies,
                emit=emit,
            )
            self.groups.append(self.checkpoints.group)
        self.prefix_cache = PrefixCache(
            self.pool,
            self.host,
            [*self.bounded, *([] if self.states is None else [self.states])],
            BlockChains(block_size, extra_keys),
            CacheHistory(min(max(4 * num_blocks, 1024), MOST_REMEMBERED)),
            block_size,
            is_enabled=enable_prefix_caching,
            cache_decoded_blocks=cache_decoded_blocks,
            emit=emit,
            listener=listener,
        )
        if self.checkpoints is not None:
            self.checkpoints.attach(self.prefix_cache)
        self._emit, self._listener = emit, listener
        self._saved: dict[str, _Saved] = {}
        self._pins: dict[int, list[list[int]]] = {}  # pinned ids by transfer id and group
        self.grown: set[str] = set()  # requests with new blocks for the worker
        self._copies = BlockCopies()

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit into the empty cache."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def bounded_usage(self) -> float:
        """Usage of the fullest bounded group."""
        return max(group.usage for group in self.bounded) if self.bounded else 0.0

    @property
    def states(self) -> StateGroup | None:
        """The group of recurrent states, or None."""
        return None if self.checkpoints is None else self.checkpoints.group

    @property
    def groups_of_tokens(self) -> list[KVGroup]:
        """The groups whose block tables have a block for each position."""
        return self.groups if self.states is None else self.groups[:-1]

    @property
    def num_tracked_requests(self) -> int:
        """Number of requests with records, plus the number of partly filled blocks in the prefix cache."""
        return len(self._saved.keys() | self.prefix_cache.request_ids) + self.prefix_cache.num_partial_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks these tokens need."""
        return -(-num_tokens // self.block_size)

    def has_free(self, num_blocks: int) -> bool:
        """Return True if every group with blocks of tokens has `num_blocks` free or cached blocks."""
        return all(group.num_free_blocks >= num_blocks for group in self.groups_of_tokens)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Return a request's prefix hit. Changes nothing.

        A preempted request uses its swapped-out KV if that covers more tokens than the cached blocks. The last token is
        always computed, for its logits.
        """
        full = self.prefix_cache.find_full_blocks(request)
        saved = self._saved.get(request.request_id)
        if saved is None or saved.num_tokens <= full.num_usable * self.block_size:
            return self.prefix_cache.computed_blocks(request, full)
        num_found = min(
            num_covered(self.bounded, full.on_device, saved.num_tokens), saved.num_tokens // self.block_size
        )
        found = full.on_device[:num_found]
        num_shared = len(full.on_device) + len(full.in_host)
        in_host = saved.host_blocks[len(found) :]
        return ComputedBlocks(found, saved.num_tokens, in_host, is_saved=True, num_shared=num_shared)

    def num_host_tokens(self, computed: ComputedBlocks) -> int:
        """Return how many tokens of a prefix hit are in cached host blocks (0 for swapped-out KV)."""
        if computed.is_saved or not computed.host_blocks:
            return 0
        return computed.num_tokens - len(computed.blocks) * self.block_size

    def update_block_hashes(self, request: Request) -> None:
        """Hash all full blocks of a request."""
        self.prefix_cache.chains.extended(request)

    def add_tables(self, request: Request) -> None:
        """Create a request's empty block tables."""
        sequence = request.sequence
        sequence.block_tables = [[] for _ in self.groups]
        sequence.first_held = [0] * len(self.groups)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks = NO_COMPUTED_BLOCKS,
        *,
        num_reserved_tokens: int = 0,
        is_loaded: bool = False,
    ) -> list[int] | None:
        """Allocate blocks for `num_new_tokens` tokens after the computed tokens.

        Return the ids added to the first group's table, including the prefix hit `computed`. If too few blocks are
        free, change nothing and return None.

        num_reserved_tokens: Minimum number of tokens that get blocks.
        is_loaded: True if a store provides the new tokens' KV. Groups then need only blocks that the next token reads.
        """
        sequence = request.sequence
        num_computed = request.num_computed_tokens + computed.num_tokens
        num_tokens = num_computed + num_new_tokens
        if num_tokens <= sequence.num_slots:
            return []
        num_read = min(num_tokens, len(sequence.token_ids) - 1) if is_loaded else num_computed
        num_step_blocks, num_held = self.num_blocks_for(num_tokens), len(sequence.block_table)
        num_all_blocks = max(num_step_blocks, self.num_blocks_for(num_reserved_tokens), num_held)
        claims: list[tuple[KVGroup, Claim]] = []
        for group in self.groups:
            claim = group.claim(sequence, computed.blocks, num_read, num_step_blocks, num_all_blocks)
            if claim.num_unheld > group.num_free_blocks:
                return None
            claims.append((group, claim))
        return self._allocate(request, computed, claims)

    def _allocate(self, request: Request, computed: ComputedBlocks, claims: list[tuple[KVGroup, Claim]]) -> list[int]:
        sequence: TokenSequence = request.sequence
        num_held, is_any_found = len(sequence.block_table), computed.num_tokens > 0
        self.grown.add(request.request_id)
        source_ids = self._hold_found(computed, claims) if is_any_found else []
        state = (None, None) if self.checkpoints is None else self.checkpoints.find(computed)
        for group, claim in claims:
            group.extend(sequence, claim)
        self._count_slots(sequence)
        if is_any_found:
            self._adopt(request, computed, source_ids)
        if not num_held:
            saved = self._saved.pop(request.request_id, None)
            if saved is not None:
                self.host.lend(saved.host_blocks)
            self.prefix_cache.announce(request, len(computed.blocks))
            if self.checkpoints is not None:
                if saved is not None and saved.state is not None:
                    self.checkpoints.host.lend(saved.state)
                    state = (None, saved.state) if computed.is_saved else state
                self.checkpoints.load(request, state)
                self.checkpoints.start(request, computed)
        return sequence.block_table[num_held:]

    def _hold_found(self, computed: ComputedBlocks, claims: list[tuple[KVGroup, Claim]]) -> list[int | None]:
        for group, claim in claims:
            group.hold(claim)
        self.host.lend(computed.host_blocks)  # before evictions, which may take host blocks
        if computed.source is None:
            return [None] * len(claims)
        source_ids = [group.id_of(computed.source) for group in self.groups]
        for group in self.groups:
            group.renew(computed.source)
        return source_ids

    def _count_slots(self, sequence: TokenSequence) -> None:
        tables = sequence.block_tables[: len(self.groups_of_tokens)]
        sequence.num_slots = min(map(len, tables)) * self.block_size

    def can_hold(self, num_tokens: int, computed: ComputedBlocks, num_spare_blocks: int) -> bool:
        """Return True if a new request of `num_tokens` fits and `num_spare_blocks` of each group stay free."""
        num_blocks = self.num_blocks_for(num_tokens)
        return all(
            group.can_hold(computed.blocks, computed.num_tokens, num_blocks, num_spare_blocks) for group in self.groups
        )

    def _adopt(self, request: Request, computed: ComputedBlocks, source_ids: Sequence[int | None]) -> None:
        sequence = request.sequence
        if computed.blocks:
            self.prefix_cache.adopt(request, computed.blocks)
        first = len(computed.blocks)
        for group, source_id in zip(self.groups_of_tokens, source_ids, strict=False):
            table = sequence.block_tables[group.index]
            if source_id is not None and table[first] != source_id:  # an evicted source may itself be the new block
                self._copies.block_copies.append((group.index, source_id, table[first]))
            for index in self._read_in_host(sequence, computed, group):
                self._copies.swap_in.append((group.index, computed.host_blocks[index - first], table[index]))
        if not request.num_preemptions:  # hits after a preemption are not reported
            sequence.num_cached_tokens = computed.num_tokens

    def _read_in_host(self, sequence: TokenSequence, computed: ComputedBlocks, group: KVGroup) -> range:
        first = len(computed.blocks)
        end = min(first + len(computed.host_blocks), self.num_blocks_for(computed.num_tokens))
        return range(max(sequence.first_held[group.index], first), end)

    def num_swapped_in(self, request: Request, computed: ComputedBlocks) -> list[int]:
        """Return how many blocks of each group are copied from host memory."""
        of_tokens = [len(self._read_in_host(request.sequence, computed, group)) for group in self.groups_of_tokens]
        return of_tokens if self.states is None else [*of_tokens, 1]

    def take_copies(self) -> BlockCopies:
        """Remove and return the copies for the next step."""
        copies, self._copies = self._copies, BlockCopies()
        if self.host.lent:
            self.host.end_lending()
        if self.checkpoints is not None:
            self.checkpoints.host.end_lending()
        return copies

    def fail_copies(self, copies: BlockCopies) -> None:
        """Discard the host blocks that a failed step should have written."""
        for group, _, host_block in copies.swap_out:
            if self.checkpoints is not None and group == self.checkpoints.group.index:
                self.checkpoints.host.drop(host_block)
            else:
                self.host.drop(host_block)

    def commit(self, request: Request) -> list[int]:
        """Add a request's full, computed blocks to the prefix cache, and make its saved states findable.

        Return the numbers of blocks after which the states were saved, in ascending order.
        """
        num_tokens = request.num_computed_tokens
        if num_tokens >= request.num_prompt_tokens or not self.prefix_cache.is_enabled:
            request.sequence.next_commit = (num_tokens // self.block_size + 1) * self.block_size
        if self.prefix_cache.is_enabled:
            self.prefix_cache.commit(request)
            if self.checkpoints is not None:
                return self.checkpoints.commit(request)
        return []

    def release_unread(self, request: Request) -> None:
        """Release blocks that no later token reads. Call this only after the saves of these blocks are scheduled."""
        if self.bounded:
            for group in self.bounded:
                group.release_unread(request.sequence, request.num_computed_tokens)
            self._count_slots(request.sequence)
            self.grown.add(request.request_id)

    def release(self, request: Request) -> None:
        """Release a request's blocks, but keep its hashes."""
        for group in self.groups:
            group.clear(request.sequence)
        self.grown.discard(request.request_id)
        request.sequence.next_commit = request.sequence.num_slots = 0
        self.prefix_cache.release(request)

    def swap_out(self, request: Request) -> bool:
        """Save a request's KV in host memory. If the KV does not fit, change nothing and return False.

        The device blocks may be released immediately, because the next step copies them before it writes KV.
        """
        num_tokens = request.num_computed_tokens
        if self.checkpoints is not None:
            num_tokens = min(num_tokens, request.sequence.saves.num_stored)
            if not all(group.has_read_blocks(request.sequence, num_tokens) for group in self.bounded):
                return False
        num_blocks = self.num_blocks_for(num_tokens)
        host_blocks = self.host.take(num_blocks) if num_blocks else None
        if host_blocks is None:
            return False
        state = None if self.checkpoints is None else self.checkpoints.swap_out(request)
        if state is None and self.checkpoints is not None:
            self.host.release(host_blocks)
            return False
        for group in self.groups_of_tokens:
            first = group.first_read(num_tokens)
            block_ids = request.sequence.block_tables[group.index][first:num_blocks]
            pairs = zip(block_ids, host_blocks[first:], strict=True)
            self._copies.swap_out.extend((group.index, block_id, host_block) for block_id, host_block in pairs)
        self._saved[request.request_id] = _Saved(host_blocks, num_tokens, state)
        return True

    def drop_saved(self, request_id: str) -> None:
        """Discard a request's swapped-out KV."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.host.release(saved.host_blocks)
            if self.checkpoints is not None and saved.state is not None:
                self.checkpoints.host.release(saved.state)

    def _evicted(self, block: Block) -> None:
        self._emit(events.BlockEvicted, block.block_id)
        if all(group.id_of(block) is not None for group in self.bounded) or self._is_used_in_host(block):
            self._keep_in_host(block)
        if self.checkpoints is not None and self.host.has_name(block.name):
            self.checkpoints.block_evicted(block)

    def _keep_in_host(self, block: Block) -> None:
        if not self._is_reachable(block.parent):
            return
        groups = self.groups_of_tokens
        ids = [(group.index, block_id) for group in groups if (block_id := group.id_of(block)) is not None]
        kept_groups = frozenset(index for index, _ in ids)
        host_block = self.host.keep(block, kept_groups)
        if host_block is not None:
            self._copies.swap_out.extend((index, block_id, host_block) for index, block_id in ids)
            self._emit(events.BlockOffloaded, block.block_id, host_block, tuple(sorted(kept_groups)))

    def _is_used_in_host(self, block: Block) -> bool:
        return self.host.has_name(block.name) or self.host.is_followed(block.name)

    def _forgotten(self, block: Block) -> None:
        for group in self.prefix_cache.parted:
            group.block_forgotten(block)

    def _is_reachable(self, parent: BlockLink | None) -> bool:
        return parent is None or self.pool.has_name(parent) or self.host.has_name(parent)

    def saved_states(self) -> list[int]:
        """Return the host slots with states of preempted requests."""
        return [saved.state for saved in self._saved.values() if saved.state is not None]

    def saved_blocks(self) -> dict[str, list[int]]:
        """Return the host blocks with swapped-out KV, by request id."""
        return {request_id: list(saved.host_blocks) for request_id, saved in self._saved.items()}

    def free(self, request: Request) -> None:
        """Release a request's blocks, and drop its records."""
        self.release(request)
        self.drop_saved(request.request_id)
        self.prefix_cache.chains.forget(request.request_id)

    def note_loaded(self, request: Request) -> None:
        """Count a request's loaded tokens as a prefix hit."""
        if not request.num_preemptions:
            request.sequence.num_cached_tokens = request.num_computed_tokens
        if self.checkpoints is not None:
            self.checkpoints.note_loaded(request)

    def most_loaded_tokens(self, num_tokens: int) -> int:
        """Return how many of a request's tokens a load can provide at most.

        A recurrent state must not include the last token, which is always computed.
        """
        return (num_tokens - (self.states is not None)) // self.block_size * self.block_size

    def pin(self, transfer_id: int, block_ids: list[list[int]], states: Iterable[int] = ()) -> None:
        """Pin blocks and slots of states for a transfer. Skips `NO_BLOCK`."""
        ids = block_ids if self.states is None else [*block_ids, list(states)]
        self._pins[transfer_id] = [[each for each in of_group if each != NO_BLOCK] for of_group in ids]
        for group, pinned in zip(self.groups, self._pins[transfer_id], strict=True):
            group.pin(pinned)

    def unpin(self, transfer_id: int) -> None:
        """Unpin a transfer's blocks. Ignores unknown and ended transfers."""
        if (pinned := self._pins.pop(transfer_id, None)) is not None:
            for group, ids in zip(self.groups, pinned, strict=True):
                group.unpin(ids)

    @property
    def num_transfers(self) -> int:
        """Number of transfers that pin blocks."""
        return len(self._pins)

    def pinned_ids(self, group: int) -> list[int]:
        """Return a group's pinned ids, once for each pin."""
        return [block_id for ids in self._pins.values() for block_id in ids[group]]

    def reset_prefix_cache(self) -> bool:
        """See `BlockPool.reset`."""
        if not self.pool.reset():
            return False
        self.host.reset()
        if self.checkpoints is not None:
            self.checkpoints.host.reset()
        self._listener.cleared()
        return True

    def advance_weights_epoch(self) -> bool:
        """Discard all KV of the old weights. If any block is held, change nothing and return False."""
        if not self.reset_prefix_cache():
            return False
        for request_id in list(self._saved):
            self.drop_saved(request_id)
        self.prefix_cache.chains.advance_weights_epoch()
        return True
