"""The blocks of the paged KV cache and their reference counts.

A block is in exactly one state: FREE (no content worth keeping), CACHED (not held, its content can be found by hash),
OWNED (in at least one block table, or pinned by a load or a save) or QUARANTINED (its bookkeeping was wrong; it is
never given out again). Taking, releasing, finding and evicting a block are O(1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv.content_pool import ContentPool
from octavo.data.snapshot import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.core.kv.block_hash import BlockHash

BlockLink = tuple[int, int]


@dataclass(slots=True, eq=False)
class Block:
    """One block of the device.

    generation: grows by one with each new content.
    token_ids, extra_keys, parent: stored with the hash, because a lookup is a hit only if all of them are equal.
    name: the name of findable content, kept as long as the device or host memory has that content: the link of the
    first block that had it. parent: the name of the content before it.
    canonical: for a private block, the link of the indexed block with the same content.
    """

    block_id: int
    ref_count: int = 0
    generation: int = 0
    hash: BlockHash | None = None
    token_ids: tuple[int, ...] = ()
    extra_keys: tuple[str, ...] = ()
    parent: BlockLink | None = None
    name: BlockLink | None = None
    canonical: BlockLink | None = None

    @property
    def link(self) -> BlockLink:
        """Id and generation, which identify this block with its present content."""
        return (self.block_id, self.generation)

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, generation={self.generation})"


class BlockPool(ContentPool[Block, Block]):
    """`num_blocks` blocks, their reference counts, the free list and the index of cached content.

    on_evict: called with each cached block that gets new content, before its content is discarded.
    on_forget: called with each block whose content can no longer be found, for any reason.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Block], None] | None = None,
        on_forget: Callable[[Block], None] | None = None,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        super().__init__(self.blocks[::-1])  # last released, first taken: it may still be in the processor's cache
        self._on_evict = on_evict or (lambda _block: None)
        self._on_forget = on_forget or (lambda _block: None)
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
        """Share of blocks that are held, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def states(self) -> bytes:
        """Return the `BlockState` of each block, one byte per block."""
        free, cached, owned, shared, quarantined = map(int, BlockState)
        states = bytearray(
            (owned if block.ref_count == 1 else shared) if block.ref_count else free if block.hash is None else cached
            for block in self.blocks
        )
        for block_id in self.quarantined:
            states[block_id] = quarantined
        return bytes(states)

    def free_list(self) -> list[int]:
        """Return the ids of the free blocks, for tests and invariants."""
        return [block.block_id for block in self._free]

    def free_block_ids(self) -> set[int]:
        """Return the ids of the free and cached blocks, for tests and invariants."""
        return {block.block_id for block in self._free} | set(self._cached)

    def _take_one(self) -> Block:
        """Take a block with a reference count of 1."""
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
        """Add one reference to each block. It cannot be evicted while it is held."""
        for block in blocks:
            if block.ref_count == 0:
                del self._cached[block.block_id]
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Release one reference to each block. Pass the last block first: the first released is the first evicted.

        Releasing a private block also renews the indexed block with the same content, which is the parent of the next
        blocks. Raises AssertionError for a block that is not held.
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
        """Make a cached block the last one to be evicted. Does nothing if it is held or has other content."""
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
        """Make a full, computed block findable. Returns the block that lookups of this content find.

        If another block with this content is indexed already, that one is returned and `block` remains private.
        name: the name of the same content in host memory; None if host memory lacks it.
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

    def _is_orphan(self, block: Block) -> bool:
        """Return whether the device lacks the content before this block: then no lookup can reach the block."""
        return block.parent is not None and block.parent not in self._names

    def _orphan(self, block: Block) -> None:
        """Remove an unreachable block from the index. If it is held, it becomes private; otherwise it becomes free."""
        self._forget(block)
        if block.ref_count == 0:
            del self._cached[block.block_id]
            self._free.append(block)

    def reset(self) -> bool:
        """Discard all cached content. Returns False with nothing changed while any block is held."""
        if self.num_free_blocks + len(self.quarantined) != self.num_blocks:
            return False
        for block in self.cached_blocks():
            self._orphan(block)
        return True

    def _forget(self, block: Block) -> None:
        assert block.hash is not None
        del self._index[block.hash]
        self._names.remove(block.name)
        block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)

    def evict(self, block: Block) -> None:
        """Evict a cached block, which must not be held. It becomes free."""
        assert block.ref_count == 0
        self._on_evict(block)
        self._orphan(block)

    def quarantine(self, block: Block) -> None:
        """Take a block out of use for good, in any state of its bookkeeping. It is never given out again."""
        if block.hash is not None:
            self._index.pop(block.hash, None)
            self._names.discard(block.name)
            block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)
        self._cached.pop(block.block_id, None)
        self._free = [other for other in self._free if other is not block]
        self.quarantined.add(block.block_id)
