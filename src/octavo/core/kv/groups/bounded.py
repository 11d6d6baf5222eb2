"""Bounded KV groups, for example for sliding-window layers.

A request holds only blocks that later tokens can still read. Each block of the first group has parts: the bounded
groups' blocks with the same positions.

The new blocks of a request with a reservation are private: lookups find a private block only after its release. If too
few blocks are free for the reservation, found blocks that no request holds also become private.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from octavo.core.kv.groups.interface import Claim
from octavo.core.kv.groups.parts import Parts
from octavo.data.kv_groups import NO_BLOCK, longest_hit, num_blocks_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.core.kv.host_block_pool import HostBlock
    from octavo.data.kv_groups import KVGroupSpec
    from octavo.data.request import Sequence as TokenSequence


class BoundedGroup(Parts):
    """A `KVGroup` with a limit on the positions that a token attends to.

    on_evict: Called with the first group's block before its part is evicted.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        *,
        block_size: int,
        max_step_tokens: int,
        blocks: Sequence[Block],  # of the first group
        on_evict: Callable[[Block], None] | None = None,
    ) -> None:
        super().__init__(index, spec, block_size=block_size, blocks=blocks, on_evict=on_evict)
        most_read = num_blocks_read(spec.kind, block_size)
        assert most_read is not None, f"{spec.kind} has no bound"
        self._most_read = most_read
        self._most_held = most_read + -(-(max_step_tokens - 1) // block_size)
        self._num_for_step = max_step_tokens // block_size
        self._left: OrderedDict[int, None] = OrderedDict()  # cached blocks to evict before those in `_cached`
        self._private: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """See `KVGroup`."""
        return super().num_free_blocks + len(self._left)

    def first_read(self, num_tokens: int) -> int:
        """See `KVGroup`."""
        return self.kind.first_position(num_tokens) // self._block_size

    def id_of(self, block: Block) -> int | None:
        """See `KVGroup`. Also return None if the part is private."""
        block_id = self._id_of.get(block.block_id)
        return None if block_id in self._private else block_id

    def id_at(self, sequence: TokenSequence, index: int) -> int | None:
        """Return the id of the part at `index` of the sequence, or None if the part was evicted."""
        table = sequence.block_tables[self.index]
        if sequence.first_held[self.index] <= index < len(table):
            return table[index]
        return self.id_of(self._blocks[sequence.block_table[index]])

    def num_covered(self, blocks: Sequence[Block], num_tokens: int) -> int:
        """See `octavo.core.kv.groups.num_covered`."""
        first = self.first_read(num_tokens)
        return next((i for i in range(first, len(blocks)) if self.id_of(blocks[i]) is None), len(blocks))

    def longest_hit(
        self, blocks: Sequence[Block], host_blocks: Sequence[HostBlock], num_tokens: int, limit: int
    ) -> int:
        """Return the largest number of leading blocks after which a request can continue."""
        is_there = [self.id_of(block) is not None for block in blocks]
        is_there += [self.index in block.groups for block in host_blocks]
        return longest_hit(self.kind, is_there, num_tokens, self._block_size, limit=limit)

    def has_read_blocks(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Return True if a sequence holds all blocks that the token at position `num_tokens` reads."""
        return self.first_read(num_tokens) >= sequence.first_held[self.index]

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """See `KVGroup`."""
        first, table = self.first_read(num_read), sequence.block_tables[self.index]
        found_ids, num_unheld = self._read(found[first:])
        is_private = num_all_blocks > num_step_blocks
        if is_private and not table:
            num_ahead = num_all_blocks - max(first, len(found))
            num_new = min(self._most_held, num_ahead)
            is_found_private = num_new + num_unheld > self.num_free_blocks
            if is_found_private:
                num_new = self._num_new(num_unheld, num_ahead)
        else:
            num_held = len(table) or max(first, len(found))
            num_new, is_found_private = max(num_step_blocks - num_held, 0), False
        return Claim(first, found_ids, num_new, num_new + num_unheld, is_private, is_found_private)

    def _read(self, found: Sequence[Block]) -> tuple[list[int], int]:
        blocks = [block.block_id for block in found]
        ids = [self._id_of[block_id] for block_id in blocks if block_id in self._id_of]
        assert len(ids) == len(blocks), f"found blocks without a part: {set(blocks) - self._id_of.keys()}"
        return ids, sum(not self._num_holders[block_id] for block_id in ids)

    def _num_new(self, num_unheld: int, num_blocks_ahead: int) -> int:
        return min(self._most_held - num_unheld, num_blocks_ahead)

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """See `KVGroup`."""
        num_needed = self.num_needed(found, num_read, num_all_blocks)
        return num_needed + min(num_spare_blocks, self.num_blocks) <= self.num_free_blocks

    def num_needed(self, found: Sequence[Block], num_read: int, num_all_blocks: int) -> int:
        """Return how many free or cached blocks a new request takes at most."""
        first = self.first_read(num_read)
        _, num_unheld = self._read(found[first:])
        return num_unheld + self._num_new(num_unheld, num_all_blocks - max(first, len(found)))

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return 1 + the maximum number of blocks that a token reads, but at most `num_all_blocks`."""
        return min(num_all_blocks, self._most_read + 1)

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """See `KVGroup`. The blocks that one step needs stay unreserved. If `is_only`, the result is True."""
        num_usable = self.num_blocks - len(self.quarantined)
        return is_only or num_blocks + num_saved + self._num_for_step <= num_usable

    def num_spare_blocks(self, max_num_seqs: int, num_all_blocks: int, num_step_blocks: int) -> int:
        """Return how many blocks `max_num_seqs` requests and one step do not need."""
        return self.num_blocks - max_num_seqs * self.num_reserved(num_all_blocks) - num_step_blocks

    def hold(self, claim: Claim) -> None:
        """See `KVGroup`."""
        self._hold(claim.found, is_private=claim.is_found_private)

    def _hold(self, block_ids: Iterable[int], *, is_private: bool) -> None:
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._place(block_id)[block_id]
                if is_private:
                    self._private.add(block_id)
            self._num_holders[block_id] += 1

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """See `KVGroup`."""
        table = sequence.block_tables[self.index]
        if not table:
            table += [NO_BLOCK] * claim.first + claim.found
            sequence.first_held[self.index] = claim.first
        self._append(sequence, claim.num_new, is_private=claim.is_private)

    def _append(self, sequence: TokenSequence, count: int, *, is_private: bool) -> None:
        table = sequence.block_tables[self.index]
        start = len(table)
        for first_group_id in sequence.block_table[start : start + count]:
            block_id = self._take()
            self._join(first_group_id, block_id)
            if is_private:
                self._private.add(block_id)
            table.append(block_id)

    def _place(self, block_id: int) -> OrderedDict[int, None]:
        return self._left if block_id in self._left else self._cached

    def _evict(self) -> int:
        place = self._left or self._cached
        block_id = next(iter(place))
        self._evict_from(place, block_id)
        return block_id

    def renew(self, block: Block) -> None:
        """See `KVGroup`."""
        block_id = self.id_of(block)
        if block_id is not None and block_id in self._place(block_id):
            del self._place(block_id)[block_id]
            self._cached[block_id] = None

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """See `KVGroup`.

        Released blocks are evicted before other cached blocks, with two exceptions: blocks of the request's prefix
        hit, and blocks that the token after the last full block reads. For each released private block, the sequence
        gets a private block for a later position, if the first group has a block for this position.
        """
        table, first = sequence.block_tables[self.index], sequence.first_held[self.index]
        last = self.first_read(num_tokens)
        if last <= first:
            return
        block_ids, num_found = table[first:last], sequence.num_cached_tokens // self._block_size
        num_private = self._release(block_ids)
        num_full_tokens = num_tokens // self._block_size * self._block_size
        for block_id in block_ids[max(num_found - first, 0) : self.first_read(num_full_tokens) - first]:
            if block_id in self._cached:
                del self._cached[block_id]
                self._left[block_id] = None
        table[first:last] = [NO_BLOCK] * (last - first)
        sequence.first_held[self.index] = last
        self._append(sequence, num_private, is_private=True)

    def clear(self, sequence: TokenSequence) -> None:
        """See `KVGroup`."""
        table = sequence.block_tables[self.index]
        if table:
            self.unpin(table[sequence.first_held[self.index] :])
            table.clear()
            sequence.first_held[self.index] = 0

    def pin(self, block_ids: Iterable[int]) -> None:
        """See `KVGroup`. Skips `NO_BLOCK`."""
        self._hold((block_id for block_id in block_ids if block_id != NO_BLOCK), is_private=False)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """See `KVGroup`. Skips `NO_BLOCK`."""
        self._release(block_id for block_id in reversed(block_ids) if block_id != NO_BLOCK)

    def _release(self, block_ids: Iterable[int]) -> int:
        num_private = 0
        for block_id in block_ids:
            if self._drop_holder(block_id):
                num_private += block_id in self._private
                self._private.discard(block_id)
        return num_private

    def quarantine(self, block_id: int) -> None:
        """See `KVGroup`."""
        super().quarantine(block_id)
        self._private.discard(block_id)

    def cached_ids(self) -> list[int]:
        """See `KVGroup`."""
        return [*self._left, *self._cached]
