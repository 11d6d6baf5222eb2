"""Blocks of host memory.

A host block is free or has one of these states:
- SAVED: It has KV of a preempted request.
- CACHED: It has content that was evicted from the device. Lookups find this content.
- LENT: The next step copies from it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.event_emitter import emit_nothing
from octavo.core.kv.cache_listener import NO_LISTENER
from octavo.core.kv.content_pool import ContentPool
from octavo.data.events import HostBlockEvicted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import Block, BlockLink
    from octavo.core.kv.cache_listener import CacheListener


_ONLY_FIRST_GROUP = frozenset({0})


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A cached host block's content (see `Block`). groups: KV groups whose content was copied from the device."""

    block_id: int
    hash: BlockHash
    token_ids: tuple[int, ...]
    extra_keys: tuple[str, ...]
    parent: BlockLink | None
    name: BlockLink
    groups: frozenset[int]


class HostBlockPool(ContentPool[int, HostBlock]):
    """The host blocks. KV of preempted requests can replace cached content, but is never replaced."""

    def __init__(
        self, num_blocks: int, emit: Callable[..., None] = emit_nothing, listener: CacheListener = NO_LISTENER
    ) -> None:
        self.num_blocks = num_blocks
        self.lent: dict[int, HostBlock | None] = {}  # cached content, or None if the copy frees the block
        super().__init__(list(range(num_blocks - 1, -1, -1)))
        self._num_followers: Counter[BlockLink | None] = Counter()  # blocks by parent's name
        self._emit = emit
        self._listener = listener

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        block_id, content = self._cached.popitem(last=False)
        self._forget(content)
        self._emit(HostBlockEvicted, block_id)
        return block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """Free saved blocks."""
        self._free.extend(block_ids)

    def is_followed(self, name: BlockLink | None) -> bool:
        """Return True if host memory has a block that continues the content with this name."""
        return name in self._num_followers

    def keep(self, block: Block, groups: frozenset[int] = _ONLY_FIRST_GROUP) -> int | None:
        """Allocate the host block for a copy of a device block. Return None if no copy is needed or possible.

        Content that is already in host memory becomes the most recently used.

        groups: The KV groups to copy, which are those with content of this block on the device.
        """
        assert block.hash is not None
        assert block.name is not None
        present = self._index.get(block.hash)
        if present is not None and present.block_id in self.lent:
            return None
        if present is not None and present.name == block.name and not present.groups < groups:
            self._cached.move_to_end(present.block_id)
            return None
        if present is not None:
            self.drop(present.block_id)
        if not self.num_free_blocks:
            return None
        block_id = self._take_one()
        content = HostBlock(block_id, block.hash, block.token_ids, block.extra_keys, block.parent, block.name, groups)
        self._cached[block_id] = self._index[content.hash] = content
        self._names.add(content.name)
        self._num_followers[content.parent] += 1
        self._listener.host_block_stored(content.hash, content.token_ids)
        return block_id

    def drop(self, block_id: int) -> None:
        """Discard a cached block."""
        content = self._cached.pop(block_id, None)
        if content is not None:
            self._forget(content)
            self._free.append(block_id)

    def reset(self) -> None:
        """Discard all cached content."""
        for block_id in list(self._cached):
            self.drop(block_id)

    def _forget(self, content: HostBlock) -> None:
        del self._index[content.hash]
        self._listener.host_block_removed(content.hash)
        self._names.remove(content.name)
        self._num_followers[content.parent] -= 1
        if not self._num_followers[content.parent]:
            del self._num_followers[content.parent]

    def lend(self, block_ids: Iterable[int]) -> None:
        """Protect blocks from eviction until the next step has copied them. Lookups still find lent blocks."""
        for block_id in block_ids:
            if block_id not in self.lent:
                self.lent[block_id] = self._cached.pop(block_id, None)

    def end_lending(self) -> None:
        """Make lent blocks with cached content CACHED again, and free all other lent blocks.

        Call this after the step with the copies was scheduled.
        """
        for block_id, content in reversed(self.lent.items()):  # a sequence's last block is evicted first
            if content is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = content
        self.lent.clear()

    def free_block_ids(self) -> list[int]:
        """Return the ids of free blocks."""
        return list(self._free)
