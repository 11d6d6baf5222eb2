"""Base class of the pools of device and host blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import Block, BlockLink
    from octavo.core.kv.host_block_pool import HostBlock

Taken = TypeVar("Taken")
Found = TypeVar("Found", "Block", "HostBlock")


class ContentPool(Generic[Taken, Found]):
    """Stores free blocks, and an index of blocks that lookups can find."""

    def __init__(self, free: list[Taken]) -> None:
        self._free = free
        self._cached: OrderedDict[int, Found] = OrderedDict()  # least recently used first
        self._index: dict[BlockHash, Found] = {}
        self._names: set[BlockLink | None] = set()

    @property
    def num_free_blocks(self) -> int:
        """Number of free and cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that lookups can find, including held blocks."""
        return len(self._index)

    def find(
        self,
        block_hash: BlockHash,
        token_ids: tuple[int, ...],
        parent: BlockLink | None,
        extra_keys: tuple[str, ...] = (),
    ) -> Found | None:
        """Return the block with this content, or None. Compares the whole content, not only the hash."""
        found = self._index.get(block_hash)
        if found is None or (found.token_ids, found.parent, found.extra_keys) != (token_ids, parent, extra_keys):
            return None
        return found

    def has_name(self, name: BlockLink | None) -> bool:
        """Return True if a block has this name (see `Block`)."""
        return name in self._names

    def indexed(self, block_hash: BlockHash | None) -> Found | None:
        """Return the block with this hash, or None."""
        return None if block_hash is None else self._index.get(block_hash)

    def cached_blocks(self) -> list[Found]:
        """Return cached blocks in eviction order."""
        return list(self._cached.values())

    def take(self, count: int) -> list[Taken] | None:
        """Allocate free blocks, then the least recently used cached blocks. Return None if fewer than `count` exist."""
        if count > self.num_free_blocks:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> Taken:
        raise NotImplementedError
