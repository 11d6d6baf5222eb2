"""The blocks of the paged KV cache and their reference counts.

A block has one of these states:
- FREE.
- CACHED: Lookups find the block. No request holds it.
- OWNED: The block has one reference.
- SHARED: The block has several references.
- QUARANTINED: The block is out of use after wrong bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv.cache_listener import NO_LISTENER
from octavo.core.kv.content_pool import ContentPool
from octavo.data.snapshot import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.cache_listener import CacheListener

BlockLink = tuple[int, int]  # (block id, generation)


@dataclass(slots=True, eq=False)
class Block:
    """A KV block in device memory.

    name: Identifies the content while the content is in device or host memory. The name is the `link` of the first
    block with this content.
    """

    block_id: int
    ref_count: int = 0
    generation: int = 0  # increases with each allocation
    hash: BlockHash | None = None
    token_ids: tuple[int, ...] = ()
    extra_keys: tuple[str, ...] = ()
    parent: BlockLink | None = None  # name of the previous block
    name: BlockLink | None = None
    canonical: BlockLink | None = None  # link of an earlier block with this content

    @property
    def link(self) -> BlockLink:
        """Identifies the block with its present content."""
        return (self.block_id, self.generation)

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, generation={self.generation})"


class BlockPool(ContentPool[Block, Block]):
    """The blocks, the free list and the index of cached content.

    on_evict: Called before a cached block is evicted. on_forget: Called when lookups no longer find a block.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Block], None] | None = None,
        on_forget: Callable[[Block], None] | None = None,
        listener: CacheListener = NO_LISTENER,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        super().__init__(self.blocks[::-1])  # last released, first reused
        self._on_evict = on_evict or (lambda _block: None)
        self._on_forget = on_forget or (lambda _block: None)
        self._listener = listener
        self.quarantined: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that are not quarantined."""
        return len(self.blocks) - len(self.quarantined)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def states(self) -> bytes:
        """Return a `BlockState` byte for each block."""
        free, cached, owned, shared, quarantined = map(int, BlockState)
        states = bytearray(
            (owned if block.ref_count == 1 else shared) if block.ref_count else free if block.hash is None else cached
            for block in self.blocks
        )
        for block_id in self.quarantined:
            states[block_id] = quarantined
        return bytes(states)

    def free_list(self) -> list[int]:
        """Return the ids of free blocks."""
        return [block.block_id for block in self._free]

    def free_block_ids(self) -> set[int]:
        """Return the ids of free and cached blocks."""
        return {block.block_id for block in self._free} | set(self._cached)

    def _take_one(self) -> Block:
        if self._free:
            block = self._free.pop()
        else:
            _, block = self._cached.popitem(last=False)
            self._on_evict(block)
            self._forget(block)
        block.generation += 1
        block.ref_count = 1
        block.canonical = None
        return block

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if block.ref_count == 0:
                del self._cached[block.block_id]
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each block. Blocks are evicted in the order of their release.

        If lookups find another block for a freed block's content, that other block becomes the last to be evicted.
        Raises AssertionError if a block is not held.
        """
        for block in blocks:
            if block.ref_count <= 0:
                raise AssertionError(f"double free of {block}")
            block.ref_count -= 1
            if block.ref_count == 0 and block.block_id not in self.quarantined:
                if block.hash is None:
                    self._free.append(block)
                    if block.canonical is not None:
                        self.renew(block.canonical)
                else:
                    self._cached[block.block_id] = block

    def renew(self, link: BlockLink) -> None:
        """Make the block with this link the last to be evicted, if it is cached."""
        block_id, generation = link
        if block_id in self._cached and self.blocks[block_id].generation == generation:
            self._cached.move_to_end(block_id)

    def register(
        self,
        block: Block,
        block_hash: BlockHash,
        token_ids: tuple[int, ...],
        parent: BlockLink | None,
        extra_keys: tuple[str, ...] = (),
        name: BlockLink | None = None,
    ) -> Block:
        """Index a full, computed block. Return the block that lookups find for this content.

        If an indexed block has the content already, that block is returned, and `block` is not indexed.

        name: The content's name in host memory, or None.
        """
        present = self._index.get(block_hash)
        if present is not None and self._is_orphan(present):
            self._orphan(present)
            present = None
        if present is not None:
            found = self.find(block_hash, token_ids, parent, extra_keys)
            block.canonical = None if found is None else found.link
            return found or block
        block.hash, block.token_ids, block.parent, block.extra_keys = block_hash, token_ids, parent, extra_keys
        block.name = name or block.link
        self._index[block_hash] = block
        self._names.add(block.name)
        return block

    def findable(self, block_id: int) -> Block | None:
        """Return the block that lookups find for the content of a registered block, or None after an eviction."""
        block = self.blocks[block_id]
        if block.canonical is not None:
            canonical_id, generation = block.canonical
            block = self.blocks[canonical_id]
            if block.generation != generation:
                return None
        return None if block.hash is None else block

    def _is_orphan(self, block: Block) -> bool:
        return block.parent is not None and block.parent not in self._names

    def _orphan(self, block: Block) -> None:
        self._forget(block)
        if block.ref_count == 0:
            del self._cached[block.block_id]
            self._free.append(block)

    def reset(self) -> bool:
        """Discard all cached content. If any block is held, change nothing and return False."""
        if self.num_free_blocks + len(self.quarantined) != self.num_blocks:
            return False
        for block in self.cached_blocks():
            self._orphan(block)
        return True

    def _forget(self, block: Block) -> None:
        assert block.hash is not None
        del self._index[block.hash]
        self._listener.block_removed(block.hash)
        self._names.remove(block.name)
        block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)

    def evict(self, block: Block) -> None:
        """Evict a cached block."""
        assert block.ref_count == 0
        self._on_evict(block)
        self._orphan(block)

    def quarantine(self, block: Block) -> None:
        """Take a block out of use."""
        if block.hash is not None:
            if self._index.pop(block.hash, None) is not None:
                self._listener.block_removed(block.hash)
            self._names.discard(block.name)
            block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)
        self._cached.pop(block.block_id, None)
        self._free = [other for other in self._free if other is not block]
        self.quarantined.add(block.block_id)
