"""Window blocks: which request holds them, when they are released, and which prefixes are found."""

from __future__ import annotations

import pytest

from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.groups import BoundedGroup
from octavo.core.kv.host_block_pool import HostBlock
from octavo.data.kv_groups import NO_BLOCK, KVGroupSpec, SlidingWindow
from octavo.data.request import Sequence


class Windows:
    """A group with a sliding window, 16 blocks of 4 tokens, and sequences that hold blocks of both."""

    def __init__(self, num_blocks=8, window=6, max_step_tokens=8):
        self.pool = BlockPool(16)
        spec = KVGroupSpec(SlidingWindow(window), num_blocks)
        self.windows = BoundedGroup(1, spec, block_size=4, max_step_tokens=max_step_tokens, blocks=self.pool.blocks)

    def start(self, num_blocks, *, num_all_blocks=0):
        """Return a sequence that computed `num_blocks` blocks and has room for more."""
        sequence = make_sequence([0] * 4 * num_blocks, 1)
        sequence.block_tables[0] += [block.block_id for block in self.pool.take(max(num_blocks, num_all_blocks))]
        self.grow(sequence, num_blocks)
        return sequence

    def grow(self, sequence, num_blocks):
        claim = self.windows.claim(sequence, [], 0, num_blocks, len(sequence.block_table))
        self.windows.extend(sequence, claim)
        return claim

    def cache(self, sequence):
        """Register the blocks of a sequence, so that other requests find them."""
        for index, block_id in enumerate(sequence.block_table):
            self.pool.register(self.pool.blocks[block_id], bytes([block_id, index]), (0,) * 4, None)

    def blocks(self, sequence):
        return [self.pool.blocks[block_id] for block_id in sequence.block_table]


def make_sequence(token_ids, num_prompt_tokens):
    return Sequence(token_ids, num_prompt_tokens, block_tables=[[], []], first_held=[0, 0])


def hits(windows, blocks, host_blocks, num_tokens):
    return windows.longest_hit(blocks, host_blocks, num_tokens, len(blocks) + len(host_blocks))


@pytest.fixture
def made():
    return Windows()


@pytest.mark.parametrize(
    ("window", "first"), [(2, [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]), (4, [0] * 7 + [1, 1, 1]), (5, [0] * 8 + [1, 1])]
)
def test_window_includes_position_of_next_row(window, first):
    windows = Windows(window=window).windows
    assert [windows.first_read(num_tokens) for num_tokens in range(10)] == first


def test_window_blocks_are_allocated_per_step_and_released_outside_window(made):
    sequence = made.start(2, num_all_blocks=2)
    assert (sequence.block_tables[1], made.windows.num_free_blocks, made.windows.usage) == ([0, 1], 6, 0.25)
    made.windows.release_unread(sequence, 8)
    assert sequence.first_held[1] == 0  # position 8 sees 3 to 8
    sequence.block_tables[0] += [block.block_id for block in made.pool.take(1)]
    assert made.grow(sequence, 3).num_unheld == 1
    made.windows.release_unread(sequence, 9)
    assert (sequence.block_tables[1], sequence.first_held[1]) == ([NO_BLOCK, 1, 2], 1)
    assert made.windows.num_free_blocks == 6
    made.windows.release_unread(sequence, 8)
    assert sequence.first_held[1] == 1
    made.windows.clear(sequence)
    assert (sequence.block_tables[1], sequence.first_held[1], made.windows.num_free_blocks) == ([], 0, 8)
    assert made.windows.parts() == {}


def test_released_window_blocks_are_cached_and_evicted_in_lru_order(made):
    first, second = made.start(2), made.start(2)
    made.cache(first)
    made.windows.clear(second)
    made.windows.clear(first)
    assert (made.windows.cached_ids(), sorted(made.windows.free_ids())) == ([1, 0], [2, 3, 4, 5, 6, 7])
    assert [made.windows.id_of(block) for block in made.blocks(first)] == [0, 1]
    assert [made.windows.id_of(block) for block in made.blocks(second)] == [None, None]
    made.windows.renew(made.blocks(first)[1])
    made.windows.renew(made.pool.blocks[15])
    assert made.windows.cached_ids() == [0, 1]
    made.start(7)
    assert [made.windows.id_of(block) for block in made.blocks(first)] == [None, 1]
    assert made.windows.num_free_blocks == 1
    assert made.windows.usage == 0.875


def test_hit_window_blocks_gain_reference_and_count_as_free_if_unheld(made):
    first, other = made.start(3), make_sequence([0] * 16, 16)
    made.cache(first)
    claim = made.windows.claim(other, made.blocks(first), 12, 4, 4)
    assert (claim.first, claim.found, claim.num_new, claim.num_unheld) == (1, [1, 2], 1, 1)
    assert made.windows.num_needed(made.blocks(first), 12, 4) == 1
    made.windows.clear(first)
    claim = made.windows.claim(other, made.blocks(first), 12, 4, 4)
    assert (claim.num_new, claim.num_unheld, claim.is_private, claim.is_found_private) == (1, 3, False, False)
    assert made.windows.num_needed(made.blocks(first), 12, 4) == 3
    made.windows.hold(claim)
    other.block_tables[0] += [*first.block_table, 11]
    made.windows.extend(other, claim)
    assert (other.block_tables[1], other.first_held[1]) == ([NO_BLOCK, 1, 2, 3], 1)
    made.windows.pin([1])
    made.windows.clear(other)
    assert [made.windows.num_holders(part) for part in range(4)] == [0, 1, 0, 0]
    assert made.windows._release([1]) == 0
    assert made.windows.cached_ids() == [0, 2, 1]
    with pytest.raises(AssertionError, match="double free of block 1 of group 1"):
        made.windows._release([1])


def test_hit_blocks_before_window_are_not_held(made):
    first, other = made.start(2), make_sequence([0] * 40, 40)
    made.cache(first)
    claim = made.windows.claim(other, made.blocks(first), 32, 9, 9)  # loaded: position 32 sees 27 to 32
    assert (claim.first, claim.found, claim.num_new) == (6, [], 3)
    assert made.windows.num_needed(made.blocks(first), 32, 9) == 3


@pytest.mark.parametrize(
    ("has_part", "num_tokens", "usable"),
    [
        ([], 9, 0),
        ([1, 1, 1], 13, 3),
        ([0, 1, 1], 13, 3),  # position 12 sees 7 to 12
        ([0, 0, 1], 13, 0),
        ([1, 1, 0], 13, 2),
        ([1, 0, 1, 1, 0], 40, 4),
        ([0, 1, 0], 13, 0),
        ([1, 1, 1], 12, 3),  # position 11 is computed again
        ([0, 1, 1], 11, 3),
    ],
)
def test_hit_length_requires_all_window_parts_of_next_row(made, has_part, num_tokens, usable):
    blocks = made.blocks(made.start(len(has_part)))
    for block, is_there in zip(blocks, has_part, strict=True):
        if not is_there:
            made.windows.block_forgotten(block)
    assert hits(made.windows, blocks, [], num_tokens) == usable
    host_blocks = [
        HostBlock(0, b"", (), (), None, (0, 0), frozenset({0, 1} if is_there else {0})) for is_there in has_part[1:]
    ]
    assert hits(made.windows, blocks[:1], host_blocks, num_tokens) == usable


def test_tokens_are_covered_if_their_window_blocks_are_held(made):
    sequence = made.start(3)
    blocks = made.blocks(sequence)
    assert made.windows.num_covered(blocks, 12) == 3
    made.windows.release_unread(sequence, 9)
    assert [made.windows.num_covered(blocks, count) for count in (4, 8, 9, 12)] == [0, 0, 3, 3]
    assert [made.windows.id_at(sequence, index) for index in range(3)] == [None, 1, 2]
    assert [made.windows.has_read_blocks(sequence, count) for count in (4, 8, 9, 12)] == [False, False, True, True]


def test_forgotten_block_loses_its_window_part(made):
    first = made.start(2)
    made.cache(first)
    one, two = made.blocks(first)
    made.windows.block_forgotten(one)  # as if its block were evicted while its part is held
    assert (made.windows.id_of(one), made.windows.id_of(two), made.windows.block_of(0)) == (None, 1, None)
    made.windows.clear(first)
    assert made.windows.free_ids()[-1] == 0
    made.windows.block_forgotten(two)
    made.windows.block_forgotten(two)
    assert (made.windows.cached_ids(), made.windows.num_free_blocks) == ([], 8)
    assert made.windows.block_of(1) is None


def test_original_block_takes_window_part_of_duplicate_block(made):
    first, second = made.start(1), made.start(1)
    [one], [two] = made.blocks(first), made.blocks(second)
    made.windows.block_doubled(two, one)
    assert (made.windows.id_of(one), made.windows.id_of(two)) == (0, 1)
    made.windows.clear(first)
    made.cache(first)
    made.windows.block_doubled(one, one)
    made.windows.block_doubled(two, two)
    assert made.windows.id_of(two) == 1
    made.windows.block_doubled(two, one)
    assert (made.windows.id_of(one), made.windows.id_of(two), made.windows.block_of(1)) == (1, None, one.block_id)
    made.windows.clear(second)
    assert made.windows.cached_ids() == [1]


def test_protected_request_reserves_private_window_blocks_at_start():
    made = Windows(num_blocks=6)
    sequence = made.start(2, num_all_blocks=9)  # a row sees at most 3 blocks, and a step needs 2 more
    made.cache(sequence)
    assert sequence.block_tables[1] == [0, 1, 2, 3, 4]
    assert [made.windows.id_of(block) for block in made.blocks(sequence)] == [None] * 9  # private: not found by others
    made.windows.release_unread(sequence, 13)
    assert (sequence.block_tables[1], sequence.first_held[1]) == ([NO_BLOCK, NO_BLOCK, 2, 3, 4, 5, 0], 2)
    assert (made.windows.cached_ids(), made.windows.num_free_blocks) == ([1], 1)
    made.windows.release_unread(sequence, 36)
    assert (len(sequence.block_tables[1]), made.windows.num_free_blocks) == (9, 4)
    assert made.windows.id_of(made.blocks(sequence)[8]) is None
    made.windows.clear(sequence)
    assert made.windows.num_free_blocks == 6
    assert made.windows.id_of(made.blocks(sequence)[8]) is not None


def test_protected_request_makes_unheld_hits_private_without_spare_blocks():
    made = Windows(num_blocks=6)
    first, other = made.start(3), make_sequence([0] * 40, 40)
    made.cache(first)
    blocks = made.blocks(first)
    shared = made.windows.claim(other, blocks, 12, 4, 9)
    assert (shared.num_new, shared.num_unheld, shared.is_private) == (5, 5, True)
    assert made.windows.num_needed(blocks, 12, 9) == 5
    made.windows.clear(first)
    alone = made.windows.claim(other, blocks, 12, 4, 9)
    assert (alone.num_new, alone.num_unheld, alone.is_private) == (3, 5, True)
    assert made.windows.num_needed(blocks, 12, 9) == 5
    assert made.windows.claim(other, blocks, 12, 4, 5).num_new == 2
    made.windows.hold(alone)
    assert [made.windows.id_of(block) for block in blocks] == [0, None, None]
    other.block_tables[0] += [*first.block_table, *range(6, 12)]
    made.windows.extend(other, alone)
    assert other.block_tables[1] == [NO_BLOCK, 1, 2, 3, 4, 5]
    made.windows.release_unread(other, 16)
    assert len(other.block_tables[1]) == 7
    more = made.windows.claim(other, [], 16, 8, 9)
    assert (more.num_new, more.num_unheld, more.is_private) == (1, 1, True)
    assert made.windows.claim(other, [], 16, 5, 9).num_new == 0


def test_reservation_covers_window_and_step_blocks(made):
    assert [made.windows.num_reserved(count) for count in (1, 3, 4, 5)] == [1, 3, 4, 4]
    assert [made.windows.can_reserve(count, 0, is_only=False) for count in (5, 6, 7)] == [True, True, False]


@pytest.mark.parametrize(("window", "num_seen"), [(2, 2), (5, 2), (6, 3), (9, 3), (10, 4)])
def test_reservation_covers_blocks_that_window_may_touch(window, num_seen):
    assert Windows(window=window).windows.num_reserved(99) == num_seen + 1
    made = Windows(num_blocks=12, window=window, max_step_tokens=1)
    assert len(made.start(1, num_all_blocks=12).block_tables[1]) == num_seen


@pytest.mark.parametrize(("max_step_tokens", "num_held"), [(1, 3), (2, 4), (5, 4), (6, 5), (9, 5)])
def test_reservation_adds_blocks_that_step_tokens_may_touch(max_step_tokens, num_held):
    made = Windows(num_blocks=12, max_step_tokens=max_step_tokens)
    assert len(made.start(1, num_all_blocks=12).block_tables[1]) == num_held
    assert [made.windows.can_reserve(12 - count, 0, is_only=False) for count in (0, 1, 2)] == [
        max_step_tokens // 4 <= count for count in (0, 1, 2)
    ]


@pytest.mark.parametrize(("window", "num_tokens", "usable"), [(5, 8, 0), (5, 9, 2), (4, 8, 2)])
def test_full_hit_requires_window_parts_of_last_token(window, num_tokens, usable):
    made = Windows(window=window)
    blocks = made.blocks(made.start(2))
    made.windows.block_forgotten(blocks[0])
    assert hits(made.windows, blocks, [], num_tokens) == usable


def test_id_at_returns_private_window_blocks(made):
    sequence = made.start(2, num_all_blocks=9)
    assert [made.windows.id_at(sequence, index) for index in (0, 4, 5)] == [0, 4, None]


@pytest.mark.parametrize("place", ["free", "cached", "held"])
def test_quarantined_window_block_is_never_allocated_again(place):
    made = Windows(num_blocks=4)
    sequence = made.start(1)
    made.cache(sequence)
    if place in {"free", "cached"}:
        made.windows.clear(sequence)
    part = 1 if place == "free" else 0
    made.windows.quarantine(part)
    assert made.windows.quarantined == {part}
    assert part not in {*made.windows.free_ids(), *made.windows.cached_ids(), *made.windows.parts().values()}
    assert made.windows.block_of(part) is None
    made.windows.clear(sequence)
    assert made.windows.num_free_blocks == 3
    assert [made.windows.can_reserve(count, 0, is_only=False) for count in (1, 2)] == [True, False]
    assert part not in made.start(3).block_tables[1]


def test_quarantined_private_window_block_is_not_replaced():
    made = Windows(num_blocks=6)
    made.start(1, num_all_blocks=9)
    made.windows.quarantine(0)
    assert made.windows._private == {1, 2, 3, 4}
    assert made.windows._release([0]) == 0


def test_pinned_private_window_block_stays_private_until_its_last_release():
    made = Windows(num_blocks=6)
    made.start(1, num_all_blocks=9)
    made.windows.pin([0])
    assert made.windows._release([0]) == 0
    assert 0 in made.windows._private
    assert made.windows._release([0]) == 1
    assert 0 not in made.windows._private


@pytest.mark.parametrize(
    ("num_found_tokens", "num_tokens", "cached"),
    [
        (0, 18, [0, 1, 6, 5, 2]),  # position 16 sees 11 to 16
        (7, 18, [1, 6, 5, 0, 2]),
        (8, 18, [6, 5, 0, 1, 2]),
        (40, 18, [6, 5, 0, 1, 2]),
        (0, 16, [0, 1, 6, 5]),
        (0, 19, [0, 1, 6, 5, 2]),
        (0, 20, [0, 1, 2, 6, 5]),
    ],
)
def test_blocks_outside_window_are_evicted_first_except_reusable_prefix_ends(num_found_tokens, num_tokens, cached):
    made = Windows(num_blocks=9)
    sequence, ended = made.start(5), made.start(2)
    made.cache(sequence)
    made.cache(ended)
    made.windows.clear(ended)
    sequence.num_cached_tokens = num_found_tokens
    made.windows.release_unread(sequence, num_tokens)
    assert made.windows.cached_ids() == cached


def test_pinned_block_outside_window_is_not_evictable():
    made = Windows(num_blocks=9)
    sequence = made.start(5)
    made.cache(sequence)
    made.windows.release_unread(sequence, 12)
    made.windows.pin([2])
    made.windows.release_unread(sequence, 20)
    assert made.windows.cached_ids() == [0, 1]
    made.windows._release([2])
    made.windows.release_unread(sequence, 24)
    assert made.windows.cached_ids() == [0, 1, 3, 2]


def test_eviction_callback_gets_block_with_its_window_part():
    made, told = Windows(num_blocks=2), []
    made.windows._on_evict = lambda block: told.append((block.block_id, made.windows.id_of(block)))
    sequence = made.start(2)
    made.cache(sequence)
    made.windows.clear(sequence)
    made.start(1)
    assert told == [(sequence.block_table[1], 1)]
    made.windows.block_forgotten(made.blocks(sequence)[0])
    made.start(1)
    assert len(told) == 1


@pytest.mark.parametrize(("num_window_blocks", "is_found_private", "num_new"), [(6, True, 3), (7, False, 5)])
def test_protected_request_shares_hits_if_spare_window_blocks_suffice(num_window_blocks, is_found_private, num_new):
    made = Windows(num_blocks=num_window_blocks)
    first, other = made.start(3), make_sequence([0] * 40, 40)
    made.cache(first)
    blocks = made.blocks(first)
    made.windows.clear(first)
    claim = made.windows.claim(other, blocks, 12, 4, 9)
    assert (claim.is_private, claim.is_found_private) == (True, is_found_private)
    assert (claim.num_new, claim.num_unheld) == (num_new, num_new + 2)
    assert made.windows.num_needed(blocks, 12, 9) == 5  # admission needs the smaller number
    made.windows.hold(claim)
    other.block_tables[0] += [*first.block_table, *range(6, 12)]
    made.windows.extend(other, claim)
    assert (made.windows.id_of(blocks[1]) is None) is is_found_private
    made.windows.release_unread(other, 20)  # all that it found
    assert len(other.block_tables[1]) == 8
    for num_tokens in range(21, 37):
        made.windows.release_unread(other, num_tokens)
    assert len(other.block_tables[1]) == 9


def test_protected_claim_is_limited_to_remaining_blocks():
    made = Windows(num_blocks=12)
    first, other = made.start(3), make_sequence([0] * 40, 40)
    made.cache(first)
    assert made.windows.claim(other, made.blocks(first), 12, 4, 5).num_new == 2


def test_claim_of_hit_without_window_part_raises(made):
    first = made.start(3)
    blocks = made.blocks(first)
    made.windows.block_forgotten(blocks[1])
    with pytest.raises(AssertionError, match=r"found blocks without a part: \{1\}"):
        made.windows.claim(make_sequence([0] * 40, 40), blocks, 12, 4, 4)


def test_blocks_outside_window_can_be_pinned_renewed_forgotten_and_quarantined():
    made = Windows(num_blocks=9)
    sequence = made.start(9)
    made.cache(sequence)
    made.windows.release_unread(sequence, 32)
    assert (made.windows.cached_ids(), made.windows.num_free_blocks) == ([0, 1, 2, 3, 4, 5], 6)
    made.windows.pin([4])
    made.windows._release([4])
    made.windows.renew(made.blocks(sequence)[0])
    assert made.windows.cached_ids() == [1, 2, 3, 5, 4, 0]
    made.windows.block_forgotten(made.blocks(sequence)[3])
    assert (made.windows.free_ids(), made.windows.num_free_blocks) == ([3], 6)
    made.windows.quarantine(2)
    assert (made.windows.cached_ids(), made.windows.num_free_blocks) == ([1, 5, 4, 0], 5)
    assert made.start(3).block_tables[1] == [3, 1, 5]
