"""The prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from octavo.core.kv.cache_history import Miss, MissReason
from octavo.core.kv.cache_listener import NO_LISTENER
from octavo.core.kv.groups import BoundedGroup, StateGroup, longest_hit, num_covered
from octavo.data.events import BlockCached, HitLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from octavo.core.kv.block_chains import BlockChain, BlockChains
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import Block, BlockLink, BlockPool
    from octavo.core.kv.cache_history import CacheHistory
    from octavo.core.kv.cache_listener import CacheListener
    from octavo.core.kv.host_block_pool import HostBlock, HostBlockPool
    from octavo.data.request import Request

_Found = TypeVar("_Found", "Block", "HostBlock")


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix hit with the KV of a request's first `num_tokens` tokens. Valid until the next allocation.

    The request shares `blocks`. `host_blocks` or `source` are copied into new blocks after `blocks`.
    num_shared: Number of cached blocks at the beginning of the request. `limit`: Why the hit is shorter, or None.
    state_name: Name of the block after which the recurrent state is saved.
    """

    blocks: list[Block]
    num_tokens: int
    host_blocks: list[int] = field(default_factory=list)
    source: Block | None = None  # has all tokens after `blocks`; only the last token is recomputed
    is_saved: bool = False  # True if `host_blocks` has KV that a preemption swapped out
    num_shared: int = 0
    limit: HitLimit | None = None
    state_name: BlockLink | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the device and in host memory."""
        return len(self.blocks) + len(self.host_blocks)


NO_COMPUTED_BLOCKS = ComputedBlocks([], 0)


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """Cached full blocks at the beginning of a request. num_shared, limit: See `ComputedBlocks`."""

    on_device: list[Block]
    in_host: list[HostBlock]
    num_usable: int  # the request can continue after this many blocks
    num_shared: int
    limit: HitLimit | None


@dataclass(frozen=True, slots=True)
class _Partial:
    block: Block
    content: tuple[list[int], BlockLink | None, tuple[str, ...]]  # tokens, parent's name, extra keys


class PrefixCache:
    """Finds and shares blocks by their hashes. parted: The KV groups after the first."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostBlockPool,
        parted: Sequence[BoundedGroup | StateGroup],
        chains: BlockChains,
        history: CacheHistory,
        block_size: int,
        *,
        is_enabled: bool,
        cache_decoded_blocks: bool,
        emit: Callable[..., None],
        listener: CacheListener = NO_LISTENER,
    ) -> None:
        self.is_enabled = is_enabled
        self.cache_decoded_blocks = cache_decoded_blocks
        self.chains = chains
        self.history = history
        self._pool = pool
        self._host = host
        self.parted = parted
        self._bounded = [group for group in parted if isinstance(group, BoundedGroup)]
        self._has_states = len(self._bounded) < len(parted)
        self._block_size = block_size
        self._emit = emit
        self._listener = listener
        self._computing: dict[BlockHash, str] = {}  # id of the request that will commit the block
        self._saving: dict[BlockHash, str] = {}  # id of the request that will save the state after the block
        self._partials: dict[BlockHash, _Partial] = {}

    @property
    def request_ids(self) -> AbstractSet[str]:
        """Ids of requests with records."""
        return self.chains.request_ids | {*self._computing.values(), *self._saving.values()}

    @property
    def num_partial_blocks(self) -> int:
        """Number of cached partly filled blocks."""
        return len(self._partials)

    def reads_cache(self, request: Request) -> bool:
        """Return True if a request may use other requests' blocks."""
        return self.is_enabled and request.reads_prefix_cache

    def find_full_blocks(self, request: Request) -> FullBlocks:
        """Find the cached full blocks at the beginning of a request.

        If a bounded group lacks its part of a device block, host memory is also searched from this block on, and the
        longer hit is returned.
        """
        found, num_tokens = self._find_from(request, 0, None, self._pool.find), len(request.sequence.token_ids)
        in_host = self._find_in_host(request, found)
        num_usable, num_shared = longest_hit(self.parted, found, in_host, num_tokens), len(found) + len(in_host)
        if self._host.num_cached_blocks and num_usable < num_shared:
            num_read = min(len(found) * self._block_size, num_tokens - 1)
            covered = found[: num_covered(self._bounded, found, num_read)]
            after = self._find_in_host(request, covered)
            num_with_host = longest_hit(self.parted, covered, after, num_tokens)
            if num_with_host > num_usable:
                found, in_host, num_usable = covered, after, num_with_host
        limit = None
        if num_usable < num_shared:
            num_without_states = longest_hit(self._bounded, found, in_host, num_tokens)
            limit = HitLimit.CHECKPOINT if num_usable < num_without_states else HitLimit.WINDOW
        return FullBlocks(found, in_host, num_usable, num_shared, limit)

    def _find_in_host(self, request: Request, found: list[Block]) -> list[HostBlock]:
        return self._find_from(request, len(found), found[-1].name if found else None, self._host.find)

    def _find_from(
        self, request: Request, first: int, name: BlockLink | None, find: Callable[..., _Found | None]
    ) -> list[_Found]:
        if not self.reads_cache(request):
            return []
        chain, token_ids, size = self.chains.extended(request), request.sequence.token_ids, self._block_size
        found: list[_Found] = []
        for index in range(first, self._num_useful_blocks(request)):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            block = find(chain.hashes[index], tokens, name, chain.keys(index))
            if block is None:
                break
            found.append(block)
            name = block.name
        return found

    def _num_useful_blocks(self, request: Request) -> int:
        num_tokens = len(request.sequence.token_ids)
        return min(num_tokens // self._block_size, -(-(num_tokens - 1) // self._block_size))

    def _most_with_state(self, request: Request) -> int:
        """Return the number of leading blocks whose state is of use: at least one token follows it."""
        return (len(request.sequence.token_ids) - 1) // self._block_size

    def computed_blocks(self, request: Request, full: FullBlocks) -> ComputedBlocks:
        """Return `full` as a prefix hit. If possible, extend it by another prompt's partly filled last block."""
        size, num_tokens = self._block_size, len(request.sequence.token_ids)
        found, num_found = full.on_device, full.num_usable
        if self._has_states:  # a state exists only at the ends of some blocks
            blocks: list[Block | HostBlock] = [*found, *full.in_host]
            return ComputedBlocks(
                found[:num_found],
                num_found * size,
                [block.block_id for block in full.in_host[: max(num_found - len(found), 0)]],
                num_shared=full.num_shared,
                limit=full.limit,
                state_name=blocks[num_found - 1].name if num_found else None,
            )
        if num_found > len(found):
            host_blocks = [block.block_id for block in full.in_host[: num_found - len(found)]]
            num_computed = min(num_found * size, num_tokens - 1)
            return ComputedBlocks(found, num_computed, host_blocks, num_shared=full.num_shared, limit=full.limit)
        if num_found * size == num_tokens:
            return ComputedBlocks(found[:-1], num_tokens - 1, source=found[-1])
        source = self._find_partial(request, found)
        if source is not None:
            return ComputedBlocks(found, num_tokens - 1, source=source)
        return ComputedBlocks(found[:num_found], num_found * size, num_shared=full.num_shared, limit=full.limit)

    def _find_partial(self, request: Request, found: list[Block]) -> Block | None:
        is_found = len(found) == request.num_prompt_tokens // self._block_size
        if not (self._partials and is_found and self.reads_cache(request)) or request.sequence.num_output_tokens:
            return None
        chain = self.chains.extended(request)
        partial = self._partials.get(self._partial_name(request, chain) or b"")
        if partial is None:
            return None
        name = found[-1].name if found else None
        content = (self._prompt_tail(request), name, chain.keys(len(found)))
        blocks = [*found, partial.block]
        is_covered = num_covered(self._bounded, blocks, request.num_prompt_tokens - 1) == len(blocks)
        return partial.block if is_covered and partial.content == content else None

    def _prompt_tail(self, request: Request) -> list[int]:
        start = request.num_prompt_tokens // self._block_size * self._block_size
        return request.sequence.token_ids[start : request.num_prompt_tokens]

    def _partial_name(self, request: Request, chain: BlockChain) -> BlockHash | None:
        num_full = request.num_prompt_tokens // self._block_size
        tail = self._prompt_tail(request)
        if len(tail) < 2:
            return None
        parent = chain.hashes[num_full - 1] if num_full else None
        return self.chains.hash_function(parent, tail, chain.keys(num_full))

    def why_missed(self, request: Request, computed: ComputedBlocks) -> Miss | None:
        """Return why the next full block was not found.

        Return None if the request does not use the cache, or if the block would save no computation.
        """
        index, size = computed.num_blocks, self._block_size
        if not self.reads_cache(request):
            return None
        num_useful = self._most_with_state(request) if self._has_states else self._num_useful_blocks(request)
        if num_useful == 0:
            return Miss(MissReason.TOO_SHORT)
        if index >= num_useful or computed.source is not None:
            return None
        if computed.limit is HitLimit.CHECKPOINT:
            return Miss(MissReason.NO_STATE)
        chain = self.chains.extended(request)
        parent = chain.hashes[index - 1] if index else None
        tokens = request.sequence.token_ids[index * size : (index + 1) * size]
        return self.history.why_missed(index, tokens, chain.hashes[index], parent, chain.keys(index))

    def num_unusable_tokens(self, request: Request, computed: ComputedBlocks) -> int:
        """Return how many cached tokens after a prefix hit are computed again because of its `limit`."""
        num_usable = len(request.sequence.token_ids) - 1
        if self._has_states:
            num_usable = self._most_with_state(request) * self._block_size
        return max(min(computed.num_shared * self._block_size, num_usable) - computed.num_tokens, 0)

    def awaited_block(self, request: Request, computed: ComputedBlocks) -> tuple[BlockHash, str] | None:
        """Return (first missing block's hash, id of the request that will commit this block), or None."""
        index = len(computed.blocks)
        if not self.reads_cache(request) or computed.is_saved or computed.source is not None:
            return None
        if self._has_states:
            return self._awaited_checkpoint(request, computed.num_blocks)
        if index >= self._num_useful_blocks(request):
            return None
        name = self.chains.extended(request).hashes[index]
        owner = self._computing.get(name)
        return None if owner is None or owner == request.request_id else (name, owner)

    def _awaited_checkpoint(self, request: Request, num_found: int) -> tuple[BlockHash, str] | None:
        """Return the last checkpoint after `num_found` blocks that another request will save, or None."""
        most = self._most_with_state(request)
        for name in reversed(self.chains.extended(request).hashes[num_found:most] if self._saving else ()):
            owner = self._saving.get(name)
            if owner is not None and owner != request.request_id:
                return name, owner
        return None

    def is_being_computed(self, block_hash: BlockHash) -> bool:
        """Return True if a running request will commit this block, or save the state after it."""
        return block_hash in (self._saving if self._has_states else self._computing)

    def announce_checkpoints(self, request: Request, borders: list[int]) -> None:
        """Record that a request will save its state after each of these numbers of blocks. Ascending."""
        if not self.reads_cache(request):
            return
        chain = self.chains.extended(request)
        chain.saving = [(border, chain.hashes[border - 1]) for border in borders]
        for _, name in chain.saving:
            self._saving.setdefault(name, request.request_id)

    def end_checkpoints(self, request: Request, num_blocks: int) -> None:
        """Record that a request has saved, or skipped, its states after up to `num_blocks` blocks."""
        chain = self.chains.of(request)
        while chain.saving and chain.saving[0][0] <= num_blocks:
            _, name = chain.saving.pop(0)
            if self._saving.get(name) == request.request_id:
                del self._saving[name]

    def adopt(self, request: Request, blocks: list[Block]) -> None:
        """Record that a request shares these blocks."""
        chain = self.chains.of(request)
        chain.num_committed, chain.name = len(blocks), blocks[-1].name

    def announce(self, request: Request, num_found: int) -> None:
        """Record that a request will compute and commit the blocks after its first `num_found` blocks."""
        if not self.reads_cache(request):
            return
        num_shared = len(request.sequence.token_ids) if self.cache_decoded_blocks else request.num_prompt_tokens
        for block_hash in self.chains.extended(request).hashes[num_found : num_shared // self._block_size]:
            self._computing.setdefault(block_hash, request.request_id)

    def commit(self, request: Request) -> None:
        """Cache a request's full blocks. Once the prompt is computed, also cache its partly filled last block."""
        num_tokens = request.num_computed_tokens
        chain = self.chains.of(request)
        if not self.cache_decoded_blocks:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        num_full = num_tokens // self._block_size
        if chain.num_committed < num_full:
            self._register(request, num_full)
        if chain.partial is None and request.num_computed_tokens >= request.num_prompt_tokens:
            self._register_partial(request, chain)

    def _register(self, request: Request, num_full: int) -> None:
        sequence, chain = request.sequence, self.chains.extended(request)
        hashes = chain.hashes
        for index in range(chain.num_committed, num_full):
            block = self._pool.blocks[sequence.block_table[index]]
            tokens = tuple(sequence.token_ids[index * self._block_size : (index + 1) * self._block_size])
            keys = chain.keys(index)
            in_host = self._host.find(hashes[index], tokens, chain.name, keys)
            name = None if in_host is None else in_host.name
            canonical = self._pool.register(block, hashes[index], tokens, chain.name, keys, name)
            for group in self.parted:
                group.block_doubled(block, canonical)
            if block.hash is not None:
                parent, salt = (hashes[index - 1], None) if index else (None, request.cache_salt)
                self.history.add(index, tokens, hashes[index], parent, keys)
                self._listener.block_stored(hashes[index], parent, tokens, salt)
                self._emit(BlockCached, block.block_id)
            if self._computing.get(hashes[index]) == request.request_id:
                del self._computing[hashes[index]]
            chain.name = canonical.name or canonical.link
        chain.num_committed = num_full

    def _register_partial(self, request: Request, chain: BlockChain) -> None:
        if request.num_computed_tokens // self._block_size > request.num_prompt_tokens // self._block_size:
            return
        name = self._partial_name(request, self.chains.extended(request)) if self.reads_cache(request) else None
        if name is not None and name not in self._partials:
            index = request.num_prompt_tokens // self._block_size
            block = self._pool.blocks[request.sequence.block_table[index]]
            self._partials[name] = _Partial(block, (self._prompt_tail(request), chain.name, chain.keys(index)))
            chain.partial = name

    def num_committed_blocks(self, request: Request) -> int:
        """Count a request's committed leading blocks."""
        chain = self.chains.get(request.request_id)
        return 0 if chain is None else chain.num_committed

    def release(self, request: Request) -> None:
        """Record that a request no longer holds or computes blocks."""
        chain = self.chains.get(request.request_id)
        if chain is None:
            return
        if chain.partial is not None:
            del self._partials[chain.partial]
            chain.partial = None
        for block_hash in chain.hashes[chain.num_committed :]:
            if self._computing.get(block_hash) == request.request_id:
                del self._computing[block_hash]
        self.end_checkpoints(request, len(chain.hashes))
        chain.num_committed, chain.name = 0, None
