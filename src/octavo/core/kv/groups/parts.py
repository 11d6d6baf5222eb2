"""The blocks of the KV groups after the first.

A block of these groups is a *part* of the first group's block that ends at the same position, and is found through it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupSpec


class Parts:
    """Free, cached and held blocks of one group.

    blocks: Of the first group. on_evict: Called with the first group's block before its part is evicted.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        *,
        block_size: int,
        blocks: Sequence[Block],
        on_evict: Callable[[Block], None] | None = None,
    ) -> None:
        self.index = index
        self.kind = spec.kind
        self.num_blocks = spec.num_blocks
        self.quarantined: set[int] = set()
        self._block_size = block_size
        self._blocks = blocks
        self._on_evict = on_evict or (lambda _block: None)
        self._free = list(range(spec.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._id_of: dict[int, int] = {}  # ids of parts, by id of the first group's block
        self._block_of: list[int | None] = [None] * spec.num_blocks
        self._num_holders = [0] * spec.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See `KVGroup`."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def id_of(self, block: Block) -> int | None:
        """See `KVGroup`."""
        return self._id_of.get(block.block_id)

    def _place(self, block_id: int) -> OrderedDict[int, None]:
        """Return the cached blocks among which a block is, if it is cached."""
        del block_id
        return self._cached

    def _evict(self) -> int:
        """Evict a cached block. Return its id."""
        raise NotImplementedError

    def _take(self) -> int:
        """Return a free block's id, after an eviction if necessary. The block gets one holder."""
        block_id = self._free.pop() if self._free else self._evict()
        self._num_holders[block_id] = 1
        return block_id

    def _evict_from(self, place: OrderedDict[int, None], block_id: int) -> None:
        del place[block_id]
        first_group_id = self._block_of[block_id]
        assert first_group_id is not None
        self._on_evict(self._blocks[first_group_id])
        self._separate(block_id)

    def pin(self, block_ids: Iterable[int]) -> None:
        """See `KVGroup`."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._place(block_id)[block_id]
            self._num_holders[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """See `KVGroup`."""
        for block_id in reversed(block_ids):
            self._drop_holder(block_id)

    def _drop_holder(self, block_id: int) -> bool:
        """Release a block once. Return True if no holder remains, unless it is quarantined."""
        if self._num_holders[block_id] <= 0:
            raise AssertionError(f"double free of block {block_id} of group {self.index}")
        self._num_holders[block_id] -= 1
        if self._num_holders[block_id] or block_id in self.quarantined:
            return False
        first_group_id = self._block_of[block_id]
        if first_group_id is not None and self._blocks[first_group_id].hash is not None:
            self._cache(block_id)
        else:
            self._separate(block_id)
            self._free.append(block_id)
        return True

    def _cache(self, block_id: int) -> None:
        """Make a block the last to be evicted."""
        self._cached[block_id] = None

    def _join(self, first_group_id: int, block_id: int) -> None:
        self._id_of[first_group_id], self._block_of[block_id] = block_id, first_group_id

    def _separate(self, block_id: int) -> None:
        first_group_id = self._block_of[block_id]
        if first_group_id is not None:
            del self._id_of[first_group_id]
            self._block_of[block_id] = None

    def block_forgotten(self, block: Block) -> None:
        """Discard the part of a block that lookups no longer find. A held part becomes free at its release."""
        block_id = self._id_of.get(block.block_id)
        if block_id is None:
            return
        self._separate(block_id)
        place = self._place(block_id)
        if block_id in place:
            del place[block_id]
            self._free.append(block_id)

    def block_doubled(self, block: Block, canonical: Block) -> None:
        """Move the part of `block` to `canonical`, unless `canonical` has a part.

        canonical: The indexed block with the same content.
        """
        block_id = self._id_of.get(block.block_id)
        if block_id is not None and canonical.block_id not in self._id_of:
            self._separate(block_id)
            self._join(canonical.block_id, block_id)

    def quarantine(self, block_id: int) -> None:
        """See `KVGroup`."""
        self._id_of = {first_group_id: other for first_group_id, other in self._id_of.items() if other != block_id}
        self._block_of[block_id] = None
        self._place(block_id).pop(block_id, None)
        self._free = [other for other in self._free if other != block_id]
        self.quarantined.add(block_id)

    def num_holders(self, block_id: int) -> int:
        """See `KVGroup`."""
        return self._num_holders[block_id]

    def free_ids(self) -> list[int]:
        """See `KVGroup`."""
        return list(self._free)

    def cached_ids(self) -> list[int]:
        """See `KVGroup`."""
        return list(self._cached)

    def block_of(self, block_id: int) -> int | None:
        """Return the first group's block id for this part, or None."""
        return self._block_of[block_id]

    def parts(self) -> dict[int, int]:
        """Map the first group's block ids to ids of parts."""
        return dict(self._id_of)
