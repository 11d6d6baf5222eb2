"""Blocks of host memory: KV of preempted requests, and what cached blocks held before their room was needed.

A host block is in exactly one place: free, SAVED (its content is one preempted request's), CACHED (its content can be
found by hash), or LENT (it is copied from in the next step, and must stay as it is until then).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.event_emitter import emit_nothing
from octavo.core.kv.content_pool import ContentPool
from octavo.data.events import HostBlockEvicted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import Block, BlockLink


_ONLY_FIRST_GROUP = frozenset({0})


@dataclass(frozen=True, slots=True)
class HostBlock:
    """The content of a host block that can be found: what `Block` says of it on the device.

    groups: KV groups whose block with this content is here, the first one always.
    """

    block_id: int
    hash: BlockHash
    token_ids: tuple[int, ...]
    extra_keys: tuple[str, ...]
    parent: BlockLink | None
    name: BlockLink
    groups: frozenset[int]


class HostBlockPool(ContentPool[int, HostBlock]):
    """Host blocks 0 .. num_blocks - 1. Preempted requests take room from cached content, never the other way round.

    emit: called with `HostBlockEvicted` and the id of each cached block whose content makes room for other content.
    """

    def __init__(self, num_blocks: int, emit: Callable[..., None] = emit_nothing) -> None:
        self.num_blocks = num_blocks
        self.lent: dict[int, HostBlock | None] = {}  # None: it is free once it was copied from
        super().__init__(list(range(num_blocks - 1, -1, -1)))
        self._num_followers: Counter[BlockLink | None] = Counter()  # contents here that come next behind a name
        self._emit = emit

    # --- for preempted requests ---------------------------------------------------------------------------------------

    def _take_one(self) -> int:
        """Take the id of a block."""
        if self._free:
            return self._free.pop()
        block_id, content = self._cached.popitem(last=False)
        self._forget(content)
        self._emit(HostBlockEvicted, block_id)
        return block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(block_ids)

    # --- for what the device has no room for --------------------------------------------------------------------------

    def is_followed(self, name: BlockLink | None) -> bool:
        """Whether any content that comes next behind that of this name is here."""
        return name in self._num_followers

    def keep(self, block: Block, groups: frozenset[int] = _ONLY_FIRST_GROUP) -> int | None:
        """Return a host block to which the content of a device's block is to be copied, or None.

        groups: KV groups of which the device has it. None if all of that is here already (it counts as used), or if
        there is no room. The same content under another name makes room: it can no longer be found, because the start
        of its sequence was lost. So does the same content if the device has that of further groups, too.
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
        return block_id

    def drop(self, block_id: int) -> None:
        """Forget the content of a cached block; nothing happens to one that is none."""
        content = self._cached.pop(block_id, None)
        if content is not None:
            self._forget(content)
            self._free.append(block_id)

    def reset(self) -> None:
        """Forget all cached content."""
        for block_id in list(self._cached):
            self.drop(block_id)

    def _forget(self, content: HostBlock) -> None:
        del self._index[content.hash]
        self._names.remove(content.name)
        self._num_followers[content.parent] -= 1
        if not self._num_followers[content.parent]:
            del self._num_followers[content.parent]

    # --- until they are copied ----------------------------------------------------------------------------------------

    def lend(self, block_ids: Iterable[int]) -> None:
        """Leave blocks as they are until the next step has copied from them: no other copy may overwrite them.

        Cached ones can be found all the same. Others are free afterwards.
        """
        for block_id in block_ids:
            if block_id not in self.lent:
                self.lent[block_id] = self._cached.pop(block_id, None)

    def end_lending(self) -> None:
        """Take back what was lent: the step is decided, and what comes later is copied later.

        Tails of chains come first, so that they are evicted before their heads.
        """
        for block_id, content in reversed(self.lent.items()):
            if content is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = content
        self.lent.clear()

    # --- for tests and invariants -------------------------------------------------------------------------------------

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks, for tests and invariants."""
        return list(self._free)
