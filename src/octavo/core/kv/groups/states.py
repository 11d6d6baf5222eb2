"""The KV group of recurrent layers.

A *slot* has the state of a sequence after some tokens. A running request has one slot, whose state each step replaces.
Other slots are *checkpoints*: the state at the end of a cached block. A checkpoint never changes. A request whose
prefix hit ends at a checkpoint starts with a copy of it.

A step saves checkpoints while it computes. They are found only after the step has succeeded.
"""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from octavo.core.kv.groups.interface import Claim
from octavo.core.kv.groups.parts import Parts
from octavo.data.request import StateSaves
from octavo.data.state_slots import StateSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.core.kv.block_pool import Block, BlockLink
    from octavo.core.kv.host_block_pool import HostBlock
    from octavo.data.kv_groups import KVGroupSpec
    from octavo.data.request import Sequence as TokenSequence

_LEAST_DISTANCE, _GROWTH = 4, 4


def borders_to_save(
    num_tokens: int,
    block_size: int,
    *,
    num_found: int,
    num_shared: int,
    cache_points: Iterable[int] = (),
    interval: int | None = None,
) -> list[int]:
    """Return after how many blocks of a request's known tokens the state is saved, in ascending order.

    These are the last full block, the end of the blocks that another request had, the request's cache points, and
    either every `interval` blocks, or blocks at growing distances from the last one: 4, 16, 64, ...

    num_found: Blocks before the state with which the request starts. num_shared: Leading blocks that the cache has.
    cache_points: Numbers of tokens, after which other requests probably differ.
    """
    last = (num_tokens - 1) // block_size
    borders = {last, num_shared, *(point // block_size for point in cache_points)}
    if interval is None:
        distance = _LEAST_DISTANCE
        while distance < last - num_found:
            borders.add(last - distance)
            distance *= _GROWTH
    else:
        borders.update(range(interval, last, interval))
    return sorted(border for border in borders if num_found < border <= last)


class StateGroup(Parts):
    """The `KVGroup` of recurrent states. Its blocks are slots. A request's block table has one slot.

    If no slot is free, the checkpoint with the least priority is evicted. The priority is the number of tokens that
    must be computed again without the checkpoint, plus the priority that the last evicted checkpoint had when this
    checkpoint was saved or found (GreedyDual; Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997). All
    slots have the same size.

    on_evict: Called with the first group's block before its checkpoint is evicted. is_in_host: Returns True if host
    memory has the checkpoint of the block with a name.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        *,
        block_size: int,
        blocks: Sequence[Block],  # of the first group
        on_evict: Callable[[Block], None] | None = None,
        is_in_host: Callable[[BlockLink | None], bool] = lambda _name: False,
    ) -> None:
        super().__init__(index, spec, block_size=block_size, blocks=blocks, on_evict=on_evict)
        self._is_in_host = is_in_host
        self._worth = [0] * spec.num_blocks  # tokens to compute again without the checkpoint
        self._priority = [0] * spec.num_blocks
        self._num_taken = [0] * spec.num_blocks
        self._evicted_priority = 0
        self._queue: list[tuple[int, int, int]] = []  # a heap of (priority, turn, slot), also with outdated entries
        self._turn: dict[int, int] = {}  # of a slot's newest entry; equal priorities are evicted in this order
        self._turns = itertools.count()

    @property
    def slots(self) -> StateSlots:
        """Usage of the slots."""
        num_checkpoints, num_free = len(self._cached), len(self._free)
        num_running = self.num_blocks - len(self.quarantined) - num_checkpoints - num_free
        return StateSlots(num_running, num_checkpoints, num_free)

    def first_read(self, num_tokens: int) -> int:
        """Return 0: a block table has only the request's own slot."""
        del num_tokens
        return 0

    def longest_hit(
        self, blocks: Sequence[Block], host_blocks: Sequence[HostBlock], num_tokens: int, limit: int
    ) -> int:
        """Return the largest number of leading blocks that end at a checkpoint. At least one token follows them."""
        num_here = len(blocks)
        most = min(limit, num_here + len(host_blocks), (num_tokens - 1) // self._block_size)
        for count in range(most, 0, -1):
            if count <= num_here and self.id_of(blocks[count - 1]) is not None:
                return count
            name = blocks[count - 1].name if count <= num_here else host_blocks[count - 1 - num_here].name
            if self._is_in_host(name):
                return count
        return 0

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """See `KVGroup`. A request needs one slot."""
        del found, num_read, num_step_blocks, num_all_blocks
        num_new = int(not sequence.block_tables[self.index])
        return Claim(0, [], num_new, num_new)

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """See `KVGroup`."""
        del found, num_read, num_all_blocks, num_spare_blocks
        return self.num_free_blocks > 0

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return 1."""
        del num_all_blocks
        return 1

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """See `KVGroup`."""
        del num_saved, is_only
        return num_blocks <= self.num_blocks - len(self.quarantined)

    def hold(self, claim: Claim) -> None:
        """Do nothing: checkpoints are copied."""

    def renew(self, block: Block) -> None:
        """See `KVGroup`."""
        slot = self.id_of(block)
        if slot is not None and slot in self._cached:
            self._cached.move_to_end(slot)
            self._priority[slot] = self._evicted_priority + self._worth[slot]
            self._enqueue(slot)

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """See `KVGroup`."""
        sequence.block_tables[self.index] += [self._take() for _ in range(claim.num_new)]

    def _take(self) -> int:
        slot = super()._take()
        self._num_taken[slot] += 1
        return slot

    def _evict(self) -> int:
        while True:
            entry = heappop(self._queue)
            if self._is_current(entry):
                break
        self._evicted_priority, _, slot = entry
        self._evict_from(self._cached, slot)
        return slot

    def _cache(self, block_id: int) -> None:
        super()._cache(block_id)
        self._enqueue(block_id)

    def _enqueue(self, slot: int) -> None:
        self._turn[slot] = next(self._turns)
        heappush(self._queue, (self._priority[slot], self._turn[slot], slot))
        if len(self._queue) > 2 * self.num_blocks:
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapify(self._queue)

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        _, turn, slot = entry
        return slot in self._cached and turn == self._turn[slot]

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Do nothing."""

    def clear(self, sequence: TokenSequence) -> None:
        """Release a sequence's slot. Discard its pending saves."""
        self.unpin([*sequence.block_tables[self.index], *sequence.saves.pending.values()])
        sequence.block_tables[self.index].clear()
        sequence.saves = StateSaves()

    def begin(self, sequence: TokenSequence, num_tokens: int, due: list[int], *, goes_on: bool) -> None:
        """Plan the saves of a sequence that starts with the state after `num_tokens` tokens.

        due: Ascending. goes_on: See `StateSaves`.
        """
        num_blocks = num_tokens // self._block_size
        sequence.saves = StateSaves(due[::-1], goes_on, num_tokens, newest=num_blocks, kept=num_blocks)

    def note_loaded(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Skip the saves in the loaded tokens. The next step copies the loaded state."""
        saves = sequence.saves
        saves.newest = saves.loaded = num_tokens // self._block_size
        saves.num_stored = num_tokens
        saves.due = [border for border in saves.due if border > saves.newest]

    def keep_loaded(self, sequence: TokenSequence) -> tuple[int, int] | None:
        """Take a slot for a checkpoint of the loaded state. Return (request's slot, new slot), or None."""
        saves, (slot,) = sequence.saves, sequence.block_tables[self.index]
        border, saves.loaded = saves.loaded, 0
        if not self._save(saves, border):
            return None
        saves.kept = border
        return slot, saves.pending[border]

    def plan_saves(self, sequence: TokenSequence, num_tokens: int) -> list[tuple[int, int]]:
        """Return the saves of the next step, which computes a sequence's tokens before `num_tokens`.

        A save is (number of tokens, slot). Ascending. After the tokens that were known at the start, the state is saved
        at the last end of a block, and replaces the previous save of this kind. A save without a free slot is skipped.

        num_tokens: Does not count drafts.
        """
        saves, size = sequence.saves, self._block_size
        saves.num_stored = min(num_tokens, len(sequence.token_ids) - 1)  # see `octavo.worker.state_rows`
        num_blocks = num_tokens // size
        if num_blocks <= saves.newest:
            return []
        planned: list[tuple[int, int]] = []
        while saves.due and saves.due[-1] <= num_blocks:
            border = saves.due.pop()
            if self._save(saves, border):
                planned.append((border * size, saves.pending[border]))
                saves.kept = border
            saves.newest = border
        if saves.goes_on and not saves.due and num_blocks > saves.newest:
            self._replace(saves)
            if self._save(saves, num_blocks):
                slot = saves.pending[num_blocks]
                planned.append((num_blocks * size, slot))
                saves.replaceable = slot, self._num_taken[slot]
            saves.newest = num_blocks
        return planned

    def _save(self, saves: StateSaves, border: int) -> bool:
        if not self.num_free_blocks:
            return False
        slot = saves.pending[border] = self._take()
        self._worth[slot] = (border - saves.kept) * self._block_size
        return True

    def _replace(self, saves: StateSaves) -> None:
        """Free the slot of the replaceable save, if it still has this content."""
        if saves.replaceable is None:
            return
        slot, num_taken = saves.replaceable
        if slot in self._cached and self._num_taken[slot] == num_taken:
            del self._cached[slot]
            self._separate(slot)
            self._free.append(slot)

    def commit(self, sequence: TokenSequence, num_committed: int, findable: Callable[[int], Block | None]) -> list[int]:
        """Make pending saves in the first `num_committed` blocks findable. Return their numbers of blocks.

        findable: See `BlockPool.findable`.
        """
        pending, ended = sequence.saves.pending, []
        while pending and (border := next(iter(pending))) <= num_committed:
            slot = pending.pop(border)
            block = findable(sequence.block_table[border - 1])
            if block is not None and block.block_id not in self._id_of:
                self._join(block.block_id, slot)
                self._priority[slot] = self._evicted_priority + self._worth[slot]
            self._drop_holder(slot)
            ended.append(border)
        return ended
