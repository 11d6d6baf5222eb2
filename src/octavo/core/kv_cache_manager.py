"""Which blocks hold the KV of which request: look up, allocate, commit, swap, free. The only writer of blocks.

What requests share of their beginnings: `prefix_cache`. Here a request's tables grow and are given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.block_chains import BlockChains
from octavo.core.block_hash import hash_block_tokens
from octavo.core.block_pool import Block, BlockLink, BlockPool
from octavo.core.cache_history import MOST_REMEMBERED, CacheHistory
from octavo.core.host_block_pool import HostBlockPool
from octavo.core.prefix_cache import NO_COMPUTED_BLOCKS, ComputedBlocks, PrefixCache
from octavo.core.window_blocks import NO_PART, WindowBlocks
from octavo.data.scheduler_output import BlockCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.core.block_hash import BlockHash
    from octavo.core.window_blocks import WindowClaim
    from octavo.data.request import Request
    from octavo.data.request import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class _Saved:
    """KV of a preempted request in host memory: its first `num_tokens`."""

    host_blocks: list[int]
    num_tokens: int


class KVCacheManager:
    """Hands out blocks of `block_size` tokens. Allocation is all or nothing; block tables are written here only.

    extra_keys, hash_function: as in `BlockChains`. cache_decoded_blocks, on_cached: as in `PrefixCache`.
    num_host_blocks: room for the blocks of preempted requests, and for what the device has no room for.
    num_window_blocks, window, max_step_tokens: as in `WindowBlocks`.
    on_evict is told of each cached block that loses its content, on_offload of each that is copied to which host block,
    and whether with its window part, and on_host_evict of each host block that loses its content.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        cache_decoded_blocks: bool = True,
        num_host_blocks: int = 0,
        num_window_blocks: int = 0,
        window: int = 0,
        max_step_tokens: int = 1,
        extra_keys: tuple[str, ...] = (),
        on_cached: Callable[[int], None] | None = None,
        on_evict: Callable[[int], None] | None = None,
        on_offload: Callable[[int, int, bool], None] | None = None,
        on_host_evict: Callable[[int], None] | None = None,
        hash_function: Callable[..., BlockHash] = hash_block_tokens,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self._evicted, self._forgotten)
        self.host = HostBlockPool(num_host_blocks, on_host_evict)
        self.windows = WindowBlocks(
            num_window_blocks, window, block_size, max_step_tokens, self.pool.blocks, self._keep_in_host
        )
        self.prefix_cache = PrefixCache(
            self.pool,
            self.host,
            self.windows,
            BlockChains(block_size, extra_keys, hash_function),
            CacheHistory(min(max(4 * num_blocks, 1024), MOST_REMEMBERED)),
            block_size,
            is_enabled=enable_prefix_caching,
            cache_decoded_blocks=cache_decoded_blocks,
            on_cached=on_cached,
        )
        self._on_evict = on_evict or (lambda _block_id: None)
        self._on_offload = on_offload or (lambda _block_id, _host_block_id, _has_window_part: None)
        self._saved: dict[str, _Saved] = {}
        self._pins: dict[int, tuple[list[Block], list[int]]] = {}  # blocks, window blocks
        self._copies = BlockCopies()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the empty cache."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found."""
        return self.pool.num_cached_blocks

    @property
    def num_tracked_requests(self) -> int:
        """Requests for which anything is kept; 0 when nobody is left."""
        return len(self._saved.keys() | self.prefix_cache.request_ids) + self.prefix_cache.num_partial_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-num_tokens // self.block_size)

    def has_free(self, num_blocks: int) -> bool:
        """Whether so many blocks could be taken now, and as many window blocks where there are any."""
        has_parts = not self.windows.num_blocks or self.windows.num_free_blocks >= num_blocks
        return has_parts and self.pool.num_free_blocks >= num_blocks

    # --- look up ------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Find what need not be computed: cached full blocks from its start, on the device and then in host memory.

        Where there is more of it, what was saved of this request itself, or filled in part by another one.
        At most num_tokens - 1 tokens: one token is always computed, for its logits. Changes no block.
        """
        full = self.prefix_cache.find_full_blocks(request)
        saved = self._saved.get(request.request_id)
        if saved is None or saved.num_tokens <= full.num_usable * self.block_size:
            return self.prefix_cache.computed_blocks(request, full)
        found = full.on_device[: self.windows.num_covered(full.on_device, saved.num_tokens)]
        return ComputedBlocks(found, saved.num_tokens, saved.host_blocks[len(found) :], is_saved=True)

    def num_host_tokens(self, computed: ComputedBlocks) -> int:
        """Return how many tokens were found in host memory, where others could find them as well."""
        if computed.is_saved or not computed.host_blocks:
            return 0
        return computed.num_tokens - len(computed.blocks) * self.block_size

    def update_block_hashes(self, request: Request) -> None:
        """Name all full blocks of a request's known tokens in `request.block_hashes`."""
        self.prefix_cache.chains.extended(request)

    # --- allocate -----------------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks = NO_COMPUTED_BLOCKS,
        *,
        num_reserved_tokens: int = 0,
        is_loaded: bool = False,
    ) -> list[int] | None:
        """Make room for `num_new_tokens` behind what is computed; the found blocks, if any, are held first.

        num_reserved_tokens: make room for so many in all, if that is more. is_loaded: they are not computed, but come
        from outside, so that only what is seen behind them has room in window blocks.
        Returns the ids appended to the request's block table (found ones included), or None with nothing changed.
        """
        sequence, table = request.sequence, request.sequence.block_table
        num_computed = request.num_computed_tokens + computed.num_tokens
        num_tokens = num_computed + num_new_tokens
        if table and num_tokens <= sequence.num_slots:
            return []
        num_all_blocks = max(self.num_blocks_for(max(num_tokens, num_reserved_tokens)), len(table))
        num_new_blocks = num_all_blocks - len(table) - len(computed.blocks)
        num_unheld = sum(block.ref_count == 0 for block in computed.blocks)
        if num_new_blocks + num_unheld > self.pool.num_free_blocks:
            return None
        claim = None
        if self.windows.num_blocks:
            num_seen = min(num_tokens, len(sequence.token_ids) - 1) if is_loaded else num_computed
            num_step_blocks = self.num_blocks_for(num_tokens)
            claim = self.windows.claim(sequence, computed.blocks, num_seen, num_step_blocks, num_all_blocks)
            if claim.num_unheld > self.windows.num_free_blocks:
                return None
        return self._allocate(request, computed, num_new_blocks, claim)

    def _allocate(
        self, request: Request, computed: ComputedBlocks, num_new_blocks: int, claim: WindowClaim | None
    ) -> list[int]:
        """Take blocks, of which there are enough, for a request; return the ids appended to its block table."""
        sequence, windows, source_part = request.sequence, self.windows, None
        is_first = not sequence.block_table
        self.pool.touch(computed.blocks)
        if claim is not None:
            windows.hold(claim.found, is_own=claim.is_found_own)
        self.host.lend(computed.host_blocks)  # before anything is evicted, which may need room there
        if computed.source is not None:
            self.pool.renew(computed.source.link)
            source_part = windows.part(computed.source)
            windows.renew(source_part)
        new_blocks = self.pool.take(num_new_blocks)
        assert new_blocks is not None
        new_ids = [block.block_id for block in (*computed.blocks, *new_blocks)]
        sequence.block_table.extend(new_ids)
        if claim is not None:
            windows.extend(sequence, claim)
            self._copy_window(sequence, computed, source_part)
        self._count_slots(sequence)
        if computed is not NO_COMPUTED_BLOCKS:
            self._adopt(request, computed, new_blocks)
        if is_first:
            self._lend_saved(request)
            self.prefix_cache.announce(request, len(computed.blocks))
        return new_ids

    def _count_slots(self, sequence: TokenSequence) -> None:
        table = sequence.window_table if self.windows.num_blocks else sequence.block_table
        sequence.num_slots = len(table) * self.block_size

    def can_hold(self, num_tokens: int, computed: ComputedBlocks, num_spare_blocks: int) -> bool:
        """Whether `num_tokens` of a request fit now and leave so many blocks free.

        A prompt is not started just to be thrown out again.
        """
        num_held, num_blocks = sum(block.ref_count > 0 for block in computed.blocks), self.num_blocks_for(num_tokens)
        if num_blocks - num_held + num_spare_blocks > self.pool.num_free_blocks:
            return False
        num_window_blocks = self.windows.most_needed(computed.blocks, computed.num_tokens, num_blocks)
        return num_window_blocks + min(num_spare_blocks, self.windows.num_blocks) <= self.windows.num_free_blocks

    def _adopt(self, request: Request, computed: ComputedBlocks, new_blocks: list[Block]) -> None:
        """Take over what was found; what must be copied is copied at the beginning of the step.

        The source of a copy is not held: where no other block was left, it is given away, even as the copy's target.
        """
        if computed.blocks:
            self.prefix_cache.adopt(request, computed.blocks)
        if computed.source is not None and computed.source is not new_blocks[0]:
            self._copies.block_copies.append((computed.source.block_id, new_blocks[0].block_id))
        targets = [block.block_id for block in new_blocks[: len(computed.host_blocks)]]
        self._copies.swap_in.extend(zip(computed.host_blocks, targets, strict=True))
        if not request.num_preemptions:  # what it finds of itself when it resumes was not found in its prompt
            request.sequence.num_cached_tokens = computed.num_tokens

    def _copy_window(self, sequence: TokenSequence, computed: ComputedBlocks, source_part: int | None) -> None:
        """Copy window parts of what was found and is still seen, as `_adopt` copies the blocks."""
        table, start = sequence.window_table, len(computed.blocks)
        for index in self._seen_in_host(sequence, computed):
            self._copies.window_swap_in.append((computed.host_blocks[index - start], table[index]))
        if source_part is not None and table[start] != source_part:
            self._copies.window_copies.append((source_part, table[start]))

    def _seen_in_host(self, sequence: TokenSequence, computed: ComputedBlocks) -> range:
        """Return which blocks of a sequence that starts were found in host memory and are still seen."""
        start = len(computed.blocks)
        end = min(start + len(computed.host_blocks), self.num_blocks_for(computed.num_tokens))
        return range(max(sequence.num_behind_window, start), end)

    def num_host_window_blocks(self, request: Request, computed: ComputedBlocks) -> int:
        """Return how many window parts are copied from host memory for a request that was just given its blocks."""
        return len(self._seen_in_host(request.sequence, computed)) if self.windows.num_blocks else 0

    def _lend_saved(self, request: Request) -> None:
        """Give up what is saved of a request that has blocks again: it is copied in, or no longer needed."""
        saved = self._saved.pop(request.request_id, None)
        if saved is not None:
            self.host.lend(saved.host_blocks)

    def take_copies(self) -> BlockCopies:
        """Return the copies that the next step begins with, once."""
        copies, self._copies = self._copies, BlockCopies()
        if self.host.lent:
            self.host.end_lending()
        return copies

    def fail_copies(self, copies: BlockCopies) -> None:
        """Believe nothing of what a step that failed was to copy into host memory."""
        for _, host_block in copies.swap_out:  # whose window part is copied is among them
            self.host.drop(host_block)

    # --- share --------------------------------------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Let others share the full blocks that are computed by now; call it once the step that wrote them is done."""
        num_tokens = request.num_computed_tokens
        if num_tokens >= request.num_prompt_tokens or not self.prefix_cache.is_enabled:
            request.sequence.next_commit = (num_tokens // self.block_size + 1) * self.block_size
        if self.prefix_cache.is_enabled:
            self.prefix_cache.commit(request)

    def leave_window(self, request: Request) -> None:
        """Let go the window parts that no row of a request sees any more; call it once their saves are ordered."""
        if self.windows.num_blocks:
            self.windows.leave(request.sequence, request.num_computed_tokens)
            self._count_slots(request.sequence)

    # --- give back ----------------------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Give back all blocks of a request that may come back (a preemption); its hashes are kept. Tail first."""
        table = request.sequence.block_table
        self.windows.clear(request.sequence)
        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(table))
        table.clear()
        request.sequence.next_commit = request.sequence.num_slots = 0
        self.prefix_cache.release(request)

    def swap_out(self, request: Request) -> bool:
        """Save what is computed of a request in host memory; False and nothing done when it does not fit there.

        The copies are made at the beginning of the next step, before anything is written: release the blocks at once.
        """
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        host_blocks = self.host.take(num_blocks) if num_blocks else None
        if host_blocks is None:
            return False
        self._copies.swap_out.extend(zip(request.sequence.block_table[:num_blocks], host_blocks, strict=True))
        if self.windows.num_blocks:
            first = self.windows.first_block(request.num_computed_tokens)
            parts = request.sequence.window_table[first:num_blocks]
            self._copies.window_swap_out.extend(zip(parts, host_blocks[first:], strict=True))
        self._saved[request.request_id] = _Saved(host_blocks, request.num_computed_tokens)
        return True

    def drop_saved(self, request_id: str) -> None:
        """Give up what is saved of a request in host memory: it is computed again."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.host.release(saved.host_blocks)

    def _evicted(self, block: Block) -> None:
        """Keep in host memory what a cached block of the device holds, if lookups can use it.

        Without its window part it is of use to those alone who find what comes behind it.
        """
        self._on_evict(block.block_id)
        part = self.windows.part(block)
        if part is not None or not self.windows.num_blocks or self._is_used_in_host(block):
            self._keep_in_host(block, part)

    def _keep_in_host(self, block: Block, part: int | None) -> None:
        """Keep a block, with its window part, in host memory if lookups can reach it; it is copied first."""
        if not self._is_reachable(block.parent):
            return
        host_block = self.host.keep(block, has_window_part=part is not None)
        if host_block is not None:
            self._copies.swap_out.append((block.block_id, host_block))
            if part is not None:
                self._copies.window_swap_out.append((part, host_block))
            self._on_offload(block.block_id, host_block, part is not None)

    def _is_used_in_host(self, block: Block) -> bool:
        return self.host.has_name(block.name) or self.host.is_followed(block.name)

    def _forgotten(self, block: Block) -> None:
        self.windows.block_forgotten(block)

    def _is_reachable(self, parent: BlockLink | None) -> bool:
        """Whether what stands behind this content may still be found: without its beginning a chain is of no use."""
        return parent is None or self.pool.has_name(parent) or self.host.has_name(parent)

    def saved_blocks(self) -> dict[str, list[int]]:
        """Host blocks of each preempted request that has any, for tests and invariants."""
        return {request_id: list(saved.host_blocks) for request_id, saved in self._saved.items()}

    def free(self, request: Request) -> None:
        """Give back all blocks of a request that ended and forget it."""
        self.release(request)
        self.drop_saved(request.request_id)
        self.prefix_cache.chains.forget(request.request_id)

    # --- transfers ----------------------------------------------------------------------------------------------------

    def note_loaded(self, request: Request) -> None:
        """Count what came from a store outside, up to a request's computed tokens, as found in its prompt."""
        if not request.num_preemptions:
            request.sequence.num_cached_tokens = request.num_computed_tokens

    def pin(self, transfer_id: int, block_ids: Sequence[int], window_block_ids: Sequence[int] = ()) -> None:
        """Hold blocks for a transfer, whatever becomes of the requests in whose tables they are."""
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        parts = [part for part in window_block_ids if part != NO_PART]
        self.pool.touch(blocks)
        self.windows.hold(parts)
        self._pins[transfer_id] = blocks, parts

    def unpin(self, transfer_id: int) -> bool:
        """Let go of a transfer's blocks; False for one that is unknown or over."""
        pinned = self._pins.pop(transfer_id, None)
        if pinned is None:
            return False
        blocks, parts = pinned
        self.windows.release(reversed(parts))
        self.pool.release(reversed(blocks))
        return True

    @property
    def num_transfers(self) -> int:
        """Transfers that hold blocks."""
        return len(self._pins)

    def pinned_blocks(self) -> list[Block]:
        """Blocks held by transfers, each as often as it is held."""
        return [block for blocks, _ in self._pins.values() for block in blocks]

    def pinned_window_blocks(self) -> list[int]:
        """Window blocks held by transfers, each as often as it is held."""
        return [part for _, parts in self._pins.values() for part in parts]

    # --- forget -------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False and nothing changed while any request holds a block."""
        if not self.pool.reset():
            return False
        self.host.reset()
        return True

    def advance_weights_epoch(self) -> bool:
        """Make everything cached or saved so far unfindable: the weights are others now.

        False and nothing changed while any request holds a block: its KV is of the old weights.
        """
        if not self.reset_prefix_cache():
            return False
        for request_id in list(self._saved):
            self.drop_saved(request_id)
        self.prefix_cache.chains.advance_weights_epoch()
        return True
