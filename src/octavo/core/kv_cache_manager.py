"""Which blocks hold the KV of which request: look up, allocate, commit, free. The only writer of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.block_hash import extend_block_hashes, hash_block_tokens
from octavo.core.block_pool import Block, BlockLink, BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.core.block_hash import BlockHash
    from octavo.request import Request


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What the prefix cache holds of a request: full blocks from its start. Valid until anything is allocated."""

    blocks: list[Block]
    num_tokens: int


NO_COMPUTED_BLOCKS = ComputedBlocks([], 0)


@dataclass(slots=True)
class _Chain:
    """A request's block hashes so far, how many of its blocks are committed, and the last committed one's link."""

    extra_keys: tuple[str, ...]
    hashes: list[BlockHash] = field(default_factory=list)
    num_committed: int = 0
    link: BlockLink | None = None


class KVCacheManager:
    """Hands out blocks of `block_size` tokens. Allocation is all or nothing; block tables are written here only.

    extra_keys: identities of the engine that the KV depends on (model, KV dtype, ...), part of every block hash.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        extra_keys: tuple[str, ...] = (),
        on_cached: Callable[[int], None] | None = None,
        on_evict: Callable[[int], None] | None = None,
        hash_function: Callable[..., BlockHash] = hash_block_tokens,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, on_evict)
        self._extra_keys = extra_keys
        self._on_cached = on_cached or (lambda _block_id: None)
        self._hash_function = hash_function
        self._chains: dict[str, _Chain] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the empty cache."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found."""
        return self.pool.num_cached_blocks

    @property
    def num_tracked_requests(self) -> int:
        """Requests for which anything is kept; 0 when nobody is left."""
        return len(self._chains)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Find the longest chain of cached full blocks that the request begins with.

        At most num_tokens - 1 tokens: one token is always computed, for its logits. Changes no block.
        """
        if not (self.enable_prefix_caching and request.reads_prefix_cache):
            return NO_COMPUTED_BLOCKS
        hashes = self._chain(request).hashes
        token_ids = request.sequence.token_ids
        extend_block_hashes(hashes, token_ids, self.block_size, self._chain(request).extra_keys, self._hash_function)
        found: list[Block] = []
        link: BlockLink | None = None
        for index in range((len(token_ids) - 1) // self.block_size):
            start = index * self.block_size
            block = self.pool.find(hashes[index], tuple(token_ids[start : start + self.block_size]), link)
            if block is None:
                break
            found.append(block)
            link = block.link
        return ComputedBlocks(found, len(found) * self.block_size)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed: ComputedBlocks = NO_COMPUTED_BLOCKS
    ) -> list[int] | None:
        """Make room for `num_new_tokens` behind what is computed; the found blocks, if any, are held first.

        Returns the ids appended to the request's block table (found ones included), or None with nothing changed.
        """
        table = request.sequence.block_table
        num_tokens = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        num_new_blocks = max(-(-num_tokens // self.block_size) - len(table) - len(computed.blocks), 0)
        num_unheld = sum(block.ref_count == 0 for block in computed.blocks)
        if num_new_blocks + num_unheld > self.pool.num_free_blocks:
            return None
        self.pool.touch(computed.blocks)
        new_blocks = self.pool.take(num_new_blocks)
        assert new_blocks is not None
        if computed.blocks:
            self._adopt(request, computed)
        new_ids = [block.block_id for block in (*computed.blocks, *new_blocks)]
        table.extend(new_ids)
        return new_ids

    def can_hold_whole(self, request: Request, computed: ComputedBlocks, num_spare_blocks: int) -> bool:
        """Whether all known tokens of a request fit now and leave so many blocks free.

        A prompt is not started just to be thrown out again.
        """
        num_blocks = -(-request.num_tokens // self.block_size)
        num_held = sum(block.ref_count > 0 for block in computed.blocks)
        return num_blocks - num_held + num_spare_blocks <= self.pool.num_free_blocks

    def _adopt(self, request: Request, computed: ComputedBlocks) -> None:
        chain = self._chain(request)
        chain.num_committed = len(computed.blocks)
        chain.link = computed.blocks[-1].link
        if not request.num_preemptions:  # what it finds of itself when it resumes was not found in its prompt
            request.sequence.num_cached_tokens = computed.num_tokens

    def commit(self, request: Request) -> None:
        """Let others share the full blocks that are computed by now; call it once the step that wrote them is done."""
        num_full = request.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching:
            return
        chain = self._chain(request)
        if chain.num_committed >= num_full:
            return
        sequence = request.sequence
        extend_block_hashes(chain.hashes, sequence.token_ids, self.block_size, chain.extra_keys, self._hash_function)
        for index in range(chain.num_committed, num_full):
            block = self.pool.blocks[sequence.block_table[index]]
            tokens = tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])
            canonical = self.pool.register(block, chain.hashes[index], tokens, chain.link)
            if canonical is block and block.hash is not None:
                self._on_cached(block.block_id)
            chain.link = canonical.link
        chain.num_committed = num_full

    def release(self, request: Request) -> None:
        """Give back all blocks of a request that may come back (a preemption); its hashes are kept. Tail first."""
        table = request.sequence.block_table
        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(table))
        table.clear()
        chain = self._chains.get(request.request_id)
        if chain is not None:
            chain.num_committed, chain.link = 0, None

    def free(self, request: Request) -> None:
        """Give back all blocks of a request that ended and forget it."""
        self.release(request)
        self._chains.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False and nothing changed while any request holds a block."""
        return self.pool.reset()

    def _chain(self, request: Request) -> _Chain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            salt = () if request.cache_salt is None else (f"salt:{request.cache_salt}",)
            chain = self._chains[request.request_id] = _Chain((*self._extra_keys, *salt))
        return chain
