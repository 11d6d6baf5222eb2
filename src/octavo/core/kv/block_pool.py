"""All blocks of the paged KV cache, and who holds them.

A block is in exactly one place: FREE (no content worth keeping), CACHED (nobody holds it, its content can be found by
hash), OWNED (in at least one block table, or pinned by a load or a save) or QUARANTINED (its books are wrong:
never given out again). Taking, releasing, finding and evicting a block are O(1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.content_pool import ContentPool
from octavo.data.snapshot import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.core.kv.block_hash import BlockHash

BlockLink = tuple[int, int]


class Block:
    """One block. generation grows whenever it gets new content.

    token_ids, extra_keys and parent are kept beside the hash, so that a hit is believed only when all of them agree.
    name: of findable content, for as long as the device or host memory has it: the link of the block that had it first;
    parent is the name of the content before it. canonical: of a private block, the link of the one that stands for the
    same content in the index.
    """

    __slots__ = (
        "block_id",
        "canonical",
        "extra_keys",
        "generation",
        "hash",
        "name",
        "parent",
        "ref_count",
        "token_ids",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.generation = 0
        self.hash: BlockHash | None = None
        self.token_ids: tuple[int, ...] = ()
        self.extra_keys: tuple[str, ...] = ()
        self.parent: BlockLink | None = None
        self.name: BlockLink | None = None
        self.canonical: BlockLink | None = None

    @property
    def link(self) -> BlockLink:
        """This block with its present content."""
        return (self.block_id, self.generation)

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, generation={self.generation})"


class BlockPool(ContentPool[Block, Block]):
    """`num_blocks` blocks, their reference counts, the free list and the index of cached content.

    on_evict is told of each cached block that is given to new content, before it forgets what it holds, and
    on_forget of each block whose content is found no more, whatever the reason.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Block], None] | None = None,
        on_forget: Callable[[Block], None] | None = None,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        super().__init__(self.blocks[::-1])  # what was released last comes first: it may be in the processor's cache
        self._on_evict = on_evict or (lambda _block: None)
        self._on_forget = on_forget or (lambda _block: None)
        self.quarantined: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks in all, less those in quarantine."""
        return len(self.blocks) - len(self.quarantined)

    @property
    def usage(self) -> float:
        """Share of blocks that are held, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def states(self) -> bytes:
        """Return the `BlockState` of each block, a byte each."""
        free, cached, owned, shared, quarantined = map(int, BlockState)
        states = bytearray(
            (owned if block.ref_count == 1 else shared) if block.ref_count else free if block.hash is None else cached
            for block in self.blocks
        )
        for block_id in self.quarantined:
            states[block_id] = quarantined
        return bytes(states)

    def free_list(self) -> list[int]:
        """Ids of the blocks without content that nobody holds, for tests and invariants."""
        return [block.block_id for block in self._free]

    def free_block_ids(self) -> set[int]:
        """Ids of the blocks nobody holds, for tests and invariants."""
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
        """Hold blocks that were found: one more reference each, out of reach of eviction."""
        for block in blocks:
            if block.ref_count == 0:
                del self._cached[block.block_id]
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Give up one reference of each. Pass a sequence's tail first: what is released first is evicted first.

        The block that stands for a private one counts as used with it: it is the parent of those that follow.
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
        """Make a cached block the last one to be evicted; nothing happens to one that is held or has other content."""
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
        """Make a full, computed block findable. Returns the block that stands for this content from now on.

        When the content is already there in another block, that one stays and `block` remains private.
        name: under which the same content is in host memory; None: it is not there.
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
        """Whether what is before it in its chain cannot be found here: then no lookup can reach it."""
        return block.parent is not None and block.parent not in self._names

    def _orphan(self, block: Block) -> None:
        """Take an unreachable block out of the index; a holder keeps it as a private one."""
        self._forget(block)
        if block.ref_count == 0:
            del self._cached[block.block_id]
            self._free.append(block)

    def reset(self) -> bool:
        """Forget all cached content. Refused (False, nothing changed) while any block is held."""
        if self.num_free_blocks + len(self.quarantined) != self.num_blocks:
            return False
        while self._cached:
            _, block = self._cached.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        return True

    def _forget(self, block: Block) -> None:
        assert block.hash is not None
        del self._index[block.hash]
        self._names.remove(block.name)
        block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)

    def evict(self, block: Block) -> None:
        """Forget a cached block that nobody holds; it is free then."""
        assert block.ref_count == 0
        self._on_evict(block)
        self._forget(block)
        del self._cached[block.block_id]
        self._free.append(block)

    def quarantine(self, block: Block) -> None:
        """Take a block out of use for good: whatever is wrong with its books, nobody is given it again."""
        if block.hash is not None:
            self._index.pop(block.hash, None)
            self._names.discard(block.name)
            block.hash, block.name, block.token_ids, block.parent, block.extra_keys = None, None, (), None, ()
        self._on_forget(block)
        self._cached.pop(block.block_id, None)
        self._free = [other for other in self._free if other is not block]
        self.quarantined.add(block.block_id)
