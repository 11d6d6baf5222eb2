"""Window blocks: where layers with a window keep what somebody still sees of a block, or may see again.

The row at position p sees the positions max(0, p - window + 1) .. p. So a request holds window blocks only from the
block of the first position that its next row sees, and takes them as its steps reach their blocks. Each one is the
window part of one block, with its present content, and is in exactly one place: FREE, HELD (in windows of requests, or
pinned by transfers), CACHED (nobody holds it, and its block can be found) or QUARANTINED (its books are wrong: never
given out again). Whoever needs one takes a free one, then a cached one that fell behind a window, then the least
recently used: the block that it was a part of stays, without its window part.

A request that must not fall any more is given at once all that it may ever hold together. What it took is its own:
others do not find it until it is let go. So what falls behind its window suffices for what comes. What it found stays
for others to find, where there is as much beside it; else it is its own, too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.core.block_pool import Block
    from octavo.core.host_block_pool import HostBlock
    from octavo.data.request import Sequence as TokenSequence

NO_PART = -1


@dataclass(frozen=True, slots=True)
class WindowClaim:
    """What a request needs of window blocks to go on.

    first: its first block that is seen. found: parts of found blocks from there on. num_new: how many more it takes.
    num_unheld: how many of both nobody holds yet. is_own: nobody else is to find what it takes; is_found_own: nor what
    it found and nobody holds.
    """

    first: int
    found: list[int]
    num_new: int
    num_unheld: int
    is_own: bool
    is_found_own: bool


class WindowBlocks:
    """`num_blocks` window blocks, 0 where no layer has a window, and which block each is a part of.

    window: the largest of all layers. max_step_tokens: as many tokens of one request may be computed at once.
    blocks: all that a window block may be a part of. Of sequences it writes `window_table` and `num_behind_window`.
    on_evict is told of each cached window block that is taken, and of the block that loses it.
    """

    def __init__(
        self,
        num_blocks: int,
        window: int,
        block_size: int,
        max_step_tokens: int,
        blocks: Sequence[Block],
        on_evict: Callable[[Block, int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self._block_size = block_size
        self._most_seen = -(-(window - 1) // block_size) + 1  # by a row anywhere in its block
        self._most_held = self._most_seen + -(-(max_step_tokens - 1) // block_size)
        self._num_for_step = max_step_tokens // block_size
        self._blocks = blocks
        self._on_evict = on_evict or (lambda _block, _part: None)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._behind: OrderedDict[int, None] = OrderedDict()  # cached ones that fell behind a window, in that order
        self._cached: OrderedDict[int, None] = OrderedDict()  # the others, least recently used first
        self._part_of: dict[int, int] = {}  # window block of a block
        self._block_of: list[int | None] = [None] * num_blocks
        self._num_holders = [0] * num_blocks
        self._own: set[int] = set()  # held by one that must not fall
        self.quarantined: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Window blocks that could be taken now, cached ones included."""
        return len(self._free) + len(self._behind) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of window blocks that are held, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    # --- look up ------------------------------------------------------------------------------------------------------

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that is seen once `num_tokens` are computed; nobody sees those before it again."""
        return max(num_tokens - self.window + 1, 0) // self._block_size

    def part(self, block: Block) -> int | None:
        """Return the window part of a block's content, if it is there for anybody."""
        part = self._part_of.get(block.block_id)
        return None if part in self._own else part

    def part_at(self, sequence: TokenSequence, index: int) -> int | None:
        """Return the window part of a block of a request, seen or not, if it has one still."""
        if sequence.num_behind_window <= index < len(sequence.window_table):
            return sequence.window_table[index]
        return self.part(self._blocks[sequence.block_table[index]])

    def num_covered(self, blocks: Sequence[Block], num_tokens: int) -> int:
        """Return how many of these blocks come before the first that is seen behind `num_tokens` and has no part."""
        first = self.first_block(num_tokens) if self.num_blocks else len(blocks)
        return next((i for i in range(first, len(blocks)) if self.part(blocks[i]) is None), len(blocks))

    def num_usable(self, blocks: Sequence[Block], host_blocks: Sequence[HostBlock], num_tokens: int) -> int:
        """Return how many of a sequence's first blocks can be gone on behind: what the next row sees has to be there.

        host_blocks: those that come next. num_tokens: of the sequence, of which one is always computed.
        """
        if not self.num_blocks:
            return len(blocks) + len(host_blocks)
        has_part = [self.part(block) is not None for block in blocks]
        has_part += [block.has_window_part for block in host_blocks]
        run = usable = 0
        for count, is_there in enumerate(has_part, 1):
            run = run + 1 if is_there else 0
            if run >= count - self.first_block(min(count * self._block_size, num_tokens - 1)):
                usable = count
        return usable

    def are_enough(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether a request holds what is seen behind its first `num_tokens`, with what it holds for more of them."""
        return self.first_block(num_tokens) >= sequence.num_behind_window

    # --- take ---------------------------------------------------------------------------------------------------------

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_seen: int, num_step_blocks: int, num_all_blocks: int
    ) -> WindowClaim:
        """Say what a request needs to go on behind `num_seen` tokens; found: blocks that it does not hold yet.

        num_step_blocks: as many has its table for the next step. num_all_blocks: and as many for all it may ever get,
        if it is not to fall: then what it takes is its own. Where that leaves it too little, so is what it found.
        """
        first = self.first_block(num_seen)
        parts, num_unheld = self._seen(found[first:])
        is_own = num_all_blocks > num_step_blocks
        if is_own and not sequence.window_table:
            num_ahead = num_all_blocks - max(first, len(found))
            num_new = min(self._most_held, num_ahead)
            is_found_own = num_new + num_unheld > self.num_free_blocks
            if is_found_own:
                num_new = self._num_new(num_unheld, num_ahead)
        else:
            num_held = len(sequence.window_table) or max(first, len(found))
            num_new, is_found_own = max(num_step_blocks - num_held, 0), False
        return WindowClaim(first, parts, num_new, num_new + num_unheld, is_own, is_found_own)

    def _seen(self, found: Sequence[Block]) -> tuple[list[int], int]:
        """Return the parts of found blocks that are seen, and how many of them nobody holds.

        Each has one: hits are cut to where that is so (`num_usable`, `num_covered`).
        """
        blocks = [block.block_id for block in found]
        parts = [self._part_of[block_id] for block_id in blocks if block_id in self._part_of]
        assert len(parts) == len(blocks), f"found blocks without window part: {set(blocks) - self._part_of.keys()}"
        return parts, sum(not self._num_holders[part] for part in parts)

    def _num_new(self, num_unheld: int, num_blocks_ahead: int) -> int:
        """Return how many more may be held together, beside so many that were found, for so many blocks to come.

        What was found becomes, once it is behind the window, the part of what comes.
        """
        return min(self._most_held - num_unheld, num_blocks_ahead)

    def most_needed(self, found: Sequence[Block], num_seen: int, num_all_blocks: int) -> int:
        """Return how many that nobody holds yet a newcomer may need, from `num_seen` tokens to so many blocks."""
        if not self.num_blocks:
            return 0
        first = self.first_block(num_seen)
        _, num_unheld = self._seen(found[first:])
        return num_unheld + self._num_new(num_unheld, num_all_blocks - max(first, len(found)))

    def share(self, num_blocks: int) -> int:
        """Return how many window blocks reservation sets aside for a request of so many blocks.

        These are what a row sees, and the block that comes next; what a longer step takes besides has `can_reserve`.
        """
        return min(num_blocks, self._most_seen + 1) if self.num_blocks else 0

    def can_reserve(self, num_set_aside: int) -> bool:
        """Whether so many can be set aside for requests, beside those that the tokens of a step take."""
        num_usable = self.num_blocks - len(self.quarantined)
        return not self.num_blocks or num_set_aside + self._num_for_step <= num_usable

    def hold(self, parts: Iterable[int], *, is_own: bool = False) -> None:
        """Hold window blocks once more each, out of reach of eviction."""
        for part in parts:
            if not self._num_holders[part]:
                del self._place(part)[part]
                if is_own:
                    self._own.add(part)
            self._num_holders[part] += 1

    def extend(self, sequence: TokenSequence, claim: WindowClaim) -> None:
        """Give a request what it claimed, once its block table is long enough; what was found is held already."""
        if not sequence.window_table:
            sequence.window_table += [NO_PART] * claim.first + claim.found
            sequence.num_behind_window = claim.first
        self._append(sequence, claim.num_new, is_own=claim.is_own)

    def _append(self, sequence: TokenSequence, count: int, *, is_own: bool) -> None:
        start = len(sequence.window_table)
        for block_id in sequence.block_table[start : start + count]:
            part = self._free.pop() if self._free else self._evict()
            self._part_of[block_id], self._block_of[part] = part, block_id
            self._num_holders[part] = 1
            if is_own:
                self._own.add(part)
            sequence.window_table.append(part)

    def _place(self, part: int) -> OrderedDict[int, None]:
        """Return where a cached window block waits to be taken."""
        return self._behind if part in self._behind else self._cached

    def _evict(self) -> int:
        part, _ = (self._behind or self._cached).popitem(last=False)
        block_id = self._block_of[part]
        assert block_id is not None
        self._on_evict(self._blocks[block_id], part)
        self._separate(part)
        return part

    def renew(self, part: int | None) -> None:
        """Make a cached window block the last one to be evicted."""
        if part is not None and part in self._place(part):
            del self._place(part)[part]
            self._cached[part] = None

    # --- let go -------------------------------------------------------------------------------------------------------

    def leave(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Let go what is behind the window of a request of which so many tokens are computed.

        It is taken before all that is cached: others come back to the end of a request, not to its middle. So what is
        seen behind its last full block stays, and what was found, to which others may come back as it did.
        What was its own is the part of what comes now, where it has blocks for that already.
        """
        first, last = sequence.num_behind_window, self.first_block(num_tokens)
        if last <= first:
            return
        parts, num_found = sequence.window_table[first:last], sequence.num_cached_tokens // self._block_size
        num_own = self.release(parts)
        num_full_tokens = num_tokens // self._block_size * self._block_size
        for part in parts[max(num_found - first, 0) : self.first_block(num_full_tokens) - first]:
            if part in self._cached:
                del self._cached[part]
                self._behind[part] = None
        sequence.window_table[first:last] = [NO_PART] * (last - first)
        sequence.num_behind_window = last
        self._append(sequence, num_own, is_own=True)

    def clear(self, sequence: TokenSequence) -> None:
        """Let go all that a request holds. Tail first."""
        if sequence.window_table:
            self.release(reversed(sequence.window_table[sequence.num_behind_window :]))
            sequence.window_table.clear()
            sequence.num_behind_window = 0

    def release(self, parts: Iterable[int]) -> int:
        """Give up one hold of each; return how many of them were somebody's own and are not held any more."""
        num_own = 0
        for part in parts:
            if self._num_holders[part] <= 0:
                raise AssertionError(f"double free of window block {part}")
            self._num_holders[part] -= 1
            if self._num_holders[part] or part in self.quarantined:
                continue
            num_own += part in self._own
            self._own.discard(part)
            block_id = self._block_of[part]
            if block_id is not None and self._blocks[block_id].hash is not None:
                self._cached[part] = None
            else:
                self._separate(part)
                self._free.append(part)
        return num_own

    # --- what becomes of blocks ---------------------------------------------------------------------------------------

    def block_forgotten(self, block: Block) -> None:
        """Take in that a block's content is found no more: neither is its part, and what comes next has another one."""
        part = self._part_of.get(block.block_id)
        if part is None:
            return
        self._separate(part)
        if part in self._place(part):
            del self._place(part)[part]
            self._free.append(part)

    def block_doubled(self, block: Block, canonical: Block) -> None:
        """Take in that another one is found in a block's stead: that gets its window part if it has none."""
        part = self._part_of.get(block.block_id)
        if part is not None and canonical.block_id not in self._part_of:
            self._separate(part)
            self._part_of[canonical.block_id], self._block_of[part] = part, canonical.block_id

    def _separate(self, part: int) -> None:
        block_id = self._block_of[part]
        if block_id is not None:
            del self._part_of[block_id]
            self._block_of[part] = None

    def quarantine(self, part: int) -> None:
        """Take a window block out of use for good: whatever is wrong with its books, nobody is given it again."""
        self._part_of = {block_id: other for block_id, other in self._part_of.items() if other != part}
        self._block_of[part] = None
        self._place(part).pop(part, None)
        self._own.discard(part)
        self._free = [other for other in self._free if other != part]
        self.quarantined.add(part)

    # --- for tests and invariants -------------------------------------------------------------------------------------

    def free_blocks(self) -> list[int]:
        """Ids of the free window blocks, for tests and invariants."""
        return list(self._free)

    def cached_blocks(self) -> list[int]:
        """Ids of those that nobody holds and that are found, the next to be evicted first, for tests and invariants."""
        return [*self._behind, *self._cached]

    def num_holders(self, part: int) -> int:
        """Return how often a window block is held, for tests and invariants."""
        return self._num_holders[part]

    def block_of(self, part: int) -> int | None:
        """Return the block that a window block is a part of, for tests and invariants."""
        return self._block_of[part]

    def parts(self) -> dict[int, int]:
        """Return the window block of each block that has one, for tests and invariants."""
        return dict(self._part_of)
