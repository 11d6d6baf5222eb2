"""The first KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups.interface import Claim
from octavo.data.kv_groups import FullAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block, BlockPool
    from octavo.data.request import Sequence as TokenSequence


class FullAttentionGroup:
    """The `KVGroup` of layers with full attention. Its blocks are in a `BlockPool`.

    In a model without full attention, the blocks store no KV, but serve prefix lookups.
    """

    index = 0
    kind = FullAttention()

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        """See `KVGroup`."""
        return self._pool.num_blocks

    @property
    def quarantined(self) -> set[int]:
        """See `KVGroup`."""
        return self._pool.quarantined

    @property
    def num_free_blocks(self) -> int:
        """See `KVGroup`."""
        return self._pool.num_free_blocks

    def first_read(self, num_tokens: int) -> int:
        """Return 0."""
        del num_tokens
        return 0

    def id_of(self, block: Block) -> int:
        """Return `block.block_id`."""
        return block.block_id

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """See `KVGroup`."""
        del num_read, num_step_blocks
        num_new = num_all_blocks - len(sequence.block_tables[0]) - len(found)
        if not found:
            return Claim(0, [], num_new, num_new)
        num_unheld = sum(block.ref_count == 0 for block in found)
        return Claim(0, [block.block_id for block in found], num_new, num_new + num_unheld)

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """See `KVGroup`."""
        del num_read
        num_held = sum(block.ref_count > 0 for block in found)
        return num_all_blocks - num_held + num_spare_blocks <= self._pool.num_free_blocks

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return `num_all_blocks`."""
        return num_all_blocks

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """See `KVGroup`. Ignores `num_saved`, because a running request's reservation includes all its blocks to save.

        Saves that outlast their request can cause preemptions (see `ReservationAdmission`).
        """
        del num_saved, is_only
        return num_blocks <= self._pool.num_usable_blocks

    def hold(self, claim: Claim) -> None:
        """See `KVGroup`."""
        self.pin(claim.found)

    def renew(self, block: Block) -> None:
        """See `KVGroup`."""
        self._pool.renew(block.link)

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """See `KVGroup`."""
        new_blocks = self._pool.take(claim.num_new)
        assert new_blocks is not None
        sequence.block_tables[0] += claim.found
        sequence.block_tables[0] += [block.block_id for block in new_blocks]

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Do nothing."""

    def clear(self, sequence: TokenSequence) -> None:
        """See `KVGroup`."""
        table = sequence.block_tables[0]
        self.unpin(table)
        table.clear()

    def pin(self, block_ids: Iterable[int]) -> None:
        """See `KVGroup`."""
        blocks = self._pool.blocks
        self._pool.touch(blocks[block_id] for block_id in block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """See `KVGroup`."""
        blocks = self._pool.blocks
        self._pool.release(blocks[block_id] for block_id in reversed(block_ids))

    def quarantine(self, block_id: int) -> None:
        """See `KVGroup`."""
        self._pool.quarantine(self._pool.blocks[block_id])

    def num_holders(self, block_id: int) -> int:
        """See `KVGroup`."""
        return self._pool.blocks[block_id].ref_count

    def free_ids(self) -> list[int]:
        """See `KVGroup`."""
        return self._pool.free_list()

    def cached_ids(self) -> list[int]:
        """See `KVGroup`."""
        return [block.block_id for block in self._pool.cached_blocks()]
