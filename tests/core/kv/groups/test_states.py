"""Slots of recurrent states: where states are saved, which are found, and which are evicted."""

from __future__ import annotations

import random

import pytest

from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.groups import Claim, StateGroup, borders_to_save
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates
from octavo.data.request import Sequence, StateSaves


class States:
    """A group of slots, 40 blocks of 4 tokens, and sequences with blocks and a slot."""

    def __init__(self, num_slots=4, make_group=StateGroup):
        self.evicted = []
        self.pool = BlockPool(40, on_forget=self.forget)
        self.group = make_group(
            1,
            KVGroupSpec(RecurrentStates(), num_slots),
            block_size=4,
            blocks=self.pool.blocks,
            on_evict=lambda block: self.evicted.append((block.block_id, self.group.id_of(block))),
        )

    def forget(self, block):
        self.group.block_forgotten(block)

    def start(self, num_blocks, due=(), *, num_found=0, goes_on=False):
        """Return a sequence with blocks and a slot, whose saves are planned."""
        sequence = Sequence([0] * 4 * num_blocks, 1, block_tables=[[], []], first_held=[0, 0])
        sequence.block_tables[0] += [block.block_id for block in self.pool.take(num_blocks)]
        self.group.extend(sequence, self.group.claim(sequence, [], 0, num_blocks, num_blocks))
        self.group.begin(sequence, 4 * num_found, list(due), goes_on=goes_on)
        return sequence

    def cache(self, sequence):
        """Register the blocks of a sequence."""
        for index, block_id in enumerate(sequence.block_table):
            self.pool.register(self.pool.blocks[block_id], bytes([block_id, index]), (0,) * 4, None)

    def commit(self, sequence, num_committed):
        return self.group.commit(sequence, num_committed, self.pool.findable)

    def saved(self, due, num_blocks=10, *, num_found=0):
        """Return a sequence whose saves are findable, and which has ended."""
        sequence = self.start(num_blocks, due, num_found=num_found)
        self.group.plan_saves(sequence, 4 * num_blocks)
        self.cache(sequence)
        self.commit(sequence, num_blocks)
        self.group.clear(sequence)
        return sequence

    def block(self, sequence, border):
        """Return the block of a sequence that ends at a border."""
        return self.pool.blocks[sequence.block_table[border - 1]]

    def borders(self, sequence):
        """Return the numbers of blocks after which a state is found."""
        borders = range(1, len(sequence.block_table) + 1)
        return [border for border in borders if self.group.id_of(self.block(sequence, border)) is not None]


@pytest.fixture
def made():
    return States()


# --- where states are saved -------------------------------------------------------------------------------------------


def borders(num_tokens, **options):
    return borders_to_save(num_tokens, 16, **{"num_found": 0, "num_shared": 0, **options})


@pytest.mark.parametrize(
    ("num_tokens", "saved"),
    [(1, []), (16, []), (17, [1]), (64, [3]), (80, [4]), (81, [1, 5]), (16 * 100, [35, 83, 95, 99])],
)
def test_states_are_saved_at_growing_distances_from_last_full_block(num_tokens, saved):
    assert borders(num_tokens) == saved


@pytest.mark.parametrize(
    ("num_tokens", "interval", "saved"),
    [(150, 4, [4, 8, 9]), (150, 1, [*range(1, 10)]), (150, 9, [9]), (150, 10, [9]), (144, 4, [4, 8]), (145, 8, [8, 9])],
)
def test_states_are_saved_at_every_interval_and_last_full_block(num_tokens, interval, saved):
    assert borders(num_tokens, interval=interval) == saved


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"num_found": 8}, [9]),
        ({"num_found": 9}, []),
        ({"num_found": 4}, [8, 9]),
        ({"num_found": 3}, [4, 8, 9]),
        ({"num_found": 4, "num_shared": 6}, [6, 8, 9]),
        ({"num_found": 4, "num_shared": 4}, [8, 9]),
        ({"num_shared": 9}, [4, 8, 9]),
        ({"num_shared": 10}, [4, 8, 9]),
    ],
)
def test_states_are_saved_only_after_found_blocks_and_where_cache_ends(options, saved):
    assert borders(150, interval=4, **options) == saved


def test_growing_distances_stop_at_found_blocks():
    assert borders(16 * 100, num_found=35) == [83, 95, 99]
    assert borders(16 * 100, num_found=34) == [35, 83, 95, 99]


@pytest.mark.parametrize(
    ("point", "saved"), [(0, []), (15, []), (16, [1]), (31, [1]), (32, [2]), (150, []), (160, []), (10**9, [])]
)
def test_cache_point_saves_state_at_end_of_its_last_full_block(point, saved):
    assert borders(150, interval=4, cache_points=(point,)) == sorted({*saved, 4, 8, 9})


def test_equal_cache_points_save_one_state():
    assert borders(150, interval=9, cache_points=(33, 40, 47, 100)) == [2, 6, 9]


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "limit", "hit"),
    [
        (99, 9, 6),
        (25, 9, 6),
        (24, 9, 3),
        (13, 9, 3),
        (12, 9, 1),
        (5, 9, 1),
        (4, 9, 0),
        (99, 5, 3),
        (99, 2, 1),
        (99, 0, 0),
    ],
)
def test_hit_is_longest_prefix_that_ends_at_checkpoint(num_tokens, limit, hit):
    made = States(8)
    sequence = made.saved([1, 3, 6, 9])
    blocks = [made.block(sequence, border) for border in range(1, 9)]  # without the block of the last checkpoint
    assert made.group.longest_hit(blocks, [], num_tokens, limit) == hit


def test_blocks_without_checkpoint_are_no_hit(made):
    sequence = made.start(3)
    made.cache(sequence)
    assert made.group.longest_hit([made.block(sequence, 1)], [], 99, 9) == 0
    assert made.group.longest_hit([], [], 99, 0) == 0


# --- the slot of a request --------------------------------------------------------------------------------------------


def test_request_needs_one_slot_in_all(made):
    sequence = made.start(3)
    assert sequence.block_tables[1] == [0]
    assert made.group.claim(sequence, [], 12, 5, 9) == Claim(0, [], 0, 0)
    assert (made.group.num_free_blocks, made.group.usage, made.group.num_holders(0)) == (3, 0.25, 1)
    made.group.extend(sequence, made.group.claim(sequence, [], 12, 5, 9))
    assert sequence.block_tables[1] == [0]
    sequence.block_tables[1].clear()
    assert made.group.claim(sequence, [], 12, 5, 9) == Claim(0, [], 1, 1)


def test_group_without_free_slot_can_hold_no_request(made):
    assert made.group.can_hold([], 0, 100, 50)
    for _ in range(3):
        made.start(1)
    assert made.group.can_hold([], 0, 100, 50)
    made.start(1)
    assert not made.group.can_hold([], 0, 0, 0)


def test_reservation_is_one_slot_for_any_length(made):
    assert [made.group.num_reserved(count) for count in (0, 1, 1000)] == [1, 1, 1]
    assert [made.group.can_reserve(count, 7, is_only=False) for count in (4, 5)] == [True, False]
    made.group.quarantine(2)
    assert [made.group.can_reserve(count, 0, is_only=True) for count in (3, 4)] == [True, False]


def test_first_read_is_first_block_of_table(made):
    assert made.group.first_read(1000) == 0


def test_hold_and_release_unread_change_nothing(made):
    sequence = made.saved([2])
    running = made.start(3)
    made.group.hold(Claim(0, [], 1, 1))
    made.group.release_unread(running, 12)
    assert (running.block_tables[1], made.group.num_free_blocks, made.borders(sequence)) == ([0], 3, [2])


# --- saves ------------------------------------------------------------------------------------------------------------


def test_due_states_are_saved_in_step_that_reaches_them():
    made = States(8)
    sequence = made.start(10, [1, 3, 4, 9])
    assert sequence.saves == StateSaves([9, 4, 3, 1])
    assert made.group.plan_saves(sequence, 3) == []
    assert made.group.plan_saves(sequence, 4) == [(4, 1)]
    assert made.group.plan_saves(sequence, 11) == []
    assert made.group.plan_saves(sequence, 17) == [(12, 2), (16, 3)]
    assert sequence.saves.pending == {1: 1, 3: 2, 4: 3}
    assert (sequence.saves.newest, sequence.saves.kept, sequence.saves.due) == (4, 4, [9])
    assert made.group.num_free_blocks == 4


def test_state_is_not_saved_twice_when_last_token_is_computed_again(made):
    sequence = made.start(3, [2], goes_on=True)
    assert made.group.plan_saves(sequence, 8) == [(8, 1)]
    assert made.group.plan_saves(sequence, 8) == []
    assert made.group.plan_saves(sequence, 11) == []
    assert made.group.plan_saves(sequence, 12) == [(12, 2)]
    assert made.group.plan_saves(sequence, 12) == []


def test_later_states_are_not_saved_unless_saves_go_on(made):
    sequence = made.start(9, [2])
    assert made.group.plan_saves(sequence, 36) == [(8, 1)]
    assert made.group.plan_saves(sequence, 40) == []


def test_start_after_found_blocks_saves_nothing_before_their_end(made):
    sequence = made.start(9, num_found=3, goes_on=True)
    assert (sequence.saves.newest, sequence.saves.kept) == (3, 3)
    assert made.group.plan_saves(sequence, 15) == []
    assert made.group.plan_saves(sequence, 16) == [(16, 1)]


def test_save_without_free_slot_is_skipped():
    made = States(2)
    sequence = made.start(9, [1, 2, 4], goes_on=True)
    assert made.group.plan_saves(sequence, 8) == [(4, 1)]
    assert (sequence.saves.pending, sequence.saves.newest, sequence.saves.kept) == ({1: 1}, 2, 1)
    made.cache(sequence)
    assert made.commit(sequence, 2) == [1]
    assert made.group.plan_saves(sequence, 16) == [(16, 1)]  # evicts the first one
    assert made.evicted == [(sequence.block_table[0], 1)]
    assert made.group.plan_saves(sequence, 20) == []
    assert (sequence.saves.newest, sequence.saves.replaceable) == (5, None)


def test_pending_save_is_found_after_its_blocks_are_committed(made):
    sequence = made.start(5, [1, 2, 4])
    made.group.plan_saves(sequence, 17)
    made.cache(sequence)
    assert made.borders(sequence) == []
    assert made.commit(sequence, 0) == []
    assert made.commit(sequence, 1) == [1]
    assert (made.borders(sequence), made.group.cached_ids()) == ([1], [1])
    assert made.commit(sequence, 3) == [2]
    assert (made.borders(sequence), sequence.saves.pending) == ([1, 2], {4: 3})
    assert [made.group.num_holders(slot) for slot in range(4)] == [1, 0, 0, 1]
    assert made.commit(sequence, 4) == [4]
    assert made.commit(sequence, 4) == []


def test_clear_discards_pending_saves(made):
    sequence = made.start(5, [1, 2], goes_on=True)
    made.group.plan_saves(sequence, 8)
    made.cache(sequence)
    made.commit(sequence, 1)
    assert made.group.num_free_blocks == 2
    made.group.clear(sequence)
    assert (sequence.block_tables[1], sequence.saves) == ([], StateSaves())
    assert (made.group.num_free_blocks, sorted(made.group.free_ids())) == (4, [0, 2, 3])
    assert made.borders(sequence) == [1]
    made.group.clear(sequence)
    assert made.group.num_free_blocks == 4


def test_second_save_after_equal_block_is_dropped(made):
    first = made.saved([2])
    second = made.start(2, [2])
    made.group.plan_saves(second, 8)
    copy = made.pool.blocks[second.block_table[1]]
    copy.canonical = made.block(first, 2).link
    assert made.commit(second, 2) == [2]
    assert made.group.id_of(made.block(first, 2)) == 1
    assert (made.group.parts(), made.group.num_free_blocks) == ({first.block_table[1]: 1}, 3)


def test_save_after_duplicate_block_is_found_at_original_block(made):
    first, second = made.start(2), made.start(2, [2])
    made.cache(first)
    made.group.plan_saves(second, 8)
    made.pool.blocks[second.block_table[1]].canonical = made.block(first, 2).link
    made.commit(second, 2)
    assert (made.borders(first), made.borders(second)) == ([2], [])


def test_save_after_block_that_lookups_do_not_find_is_dropped(made):
    sequence = made.start(2, [2])
    made.group.plan_saves(sequence, 8)
    assert made.commit(sequence, 2) == [2]
    assert (made.borders(sequence), made.group.parts(), made.group.num_free_blocks) == ([], {}, 3)


# --- saves while decoding ---------------------------------------------------------------------------------------------


def test_each_save_while_decoding_replaces_previous_one(made):
    sequence = made.start(9, [2], goes_on=True)
    made.cache(sequence)
    found = []
    for num_blocks in range(2, 7):
        made.group.plan_saves(sequence, 4 * num_blocks)
        made.commit(sequence, num_blocks)
        found.append(made.borders(sequence))
    assert found == [[2], [2, 3], [2, 4], [2, 5], [2, 6]]
    assert (made.group.num_free_blocks, made.evicted) == (3, [])
    made.group.plan_saves(sequence, 28)
    assert (made.borders(sequence), made.group.num_free_blocks) == ([2], 2)


def test_save_while_decoding_takes_only_last_end_of_block(made):
    sequence = made.start(9, [1], goes_on=True)
    assert made.group.plan_saves(sequence, 19) == [(4, 1), (16, 2)]
    assert (sequence.saves.newest, sequence.saves.kept) == (4, 1)


def test_pending_save_is_not_replaced(made):
    sequence = made.start(9, goes_on=True)
    made.cache(sequence)
    assert made.group.plan_saves(sequence, 4) == [(4, 1)]
    assert made.group.plan_saves(sequence, 8) == [(8, 2)]  # the first step has no result yet
    assert made.commit(sequence, 2) == [1, 2]
    assert made.group.plan_saves(sequence, 12) == [(12, 2)]
    assert made.borders(sequence) == [1]


def test_save_that_was_pending_without_free_slot_is_replaced_later():
    made = States(2)
    sequence = made.start(9, goes_on=True)
    made.cache(sequence)
    assert made.group.plan_saves(sequence, 4) == [(4, 1)]
    assert made.group.plan_saves(sequence, 8) == []
    made.commit(sequence, 2)
    assert made.group.plan_saves(sequence, 12) == [(12, 1)]
    assert made.evicted == []


def test_slot_with_other_content_is_not_replaced():
    made = States(3)
    sequence, other = made.start(9, goes_on=True), made.start(2, [1])
    made.cache(sequence)
    made.cache(other)
    made.group.plan_saves(sequence, 4)
    made.commit(sequence, 1)
    assert made.group.plan_saves(other, 4) == [(4, 2)]  # evicts the save of the first sequence
    made.commit(other, 1)
    assert (made.borders(sequence), made.borders(other)) == ([], [1])
    made.group.clear(other)
    assert made.group.plan_saves(sequence, 8) == [(8, 1)]
    assert made.borders(other) == [1]


def test_forgotten_save_is_not_replaced(made):
    sequence = made.start(9, goes_on=True)
    made.cache(sequence)
    made.group.plan_saves(sequence, 4)
    made.commit(sequence, 1)
    made.group.block_forgotten(made.block(sequence, 1))
    assert made.group.num_free_blocks == 3
    assert made.group.plan_saves(sequence, 8) == [(8, 1)]
    assert made.group.num_free_blocks == 2


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_free_slot_is_taken_before_checkpoint_is_evicted(made):
    saved = made.saved([1, 5])
    for _ in range(2):
        made.start(1)
    assert made.borders(saved) == [1, 5]
    made.start(1)
    assert made.borders(saved) == [5]


def test_checkpoint_with_fewest_tokens_to_compute_again_is_evicted_first():
    made = States(5)
    saved = made.saved([3, 4, 9])  # 12, 4 and 20 tokens to compute again
    running, left = [made.start(1) for _ in range(2)], []
    for _ in range(3):
        running.append(made.start(1))
        left.append(made.borders(saved))
    assert left == [[3, 9], [9], []]
    assert made.evicted == [(saved.block_table[border - 1], slot) for border, slot in ((4, 2), (3, 1), (9, 3))]
    assert made.group.num_free_blocks == 0


def test_found_blocks_are_no_tokens_to_compute_again():
    made = States(3)
    near, far = made.saved([9], num_found=8), made.saved([2])
    for _ in range(2):
        made.start(1)
    assert (made.borders(near), made.borders(far)) == ([], [2])


def test_skipped_and_replaced_saves_count_as_tokens_to_compute_again():
    made = States(2)
    sequence = made.start(10, [1, 2, 5])
    made.group.plan_saves(sequence, 8)
    made.cache(sequence)
    made.commit(sequence, 2)
    [(_, slot)] = made.group.plan_saves(sequence, 20)
    assert made.group._worth[slot] == 16  # from block 1 to block 5: block 2 was skipped
    made = States(4)
    sequence = made.start(10, [2], goes_on=True)
    made.cache(sequence)
    for num_blocks in (2, 3, 4):
        [(_, slot)] = made.group.plan_saves(sequence, 4 * num_blocks)
        made.commit(sequence, num_blocks)
    assert made.group._worth[slot] == 8


def test_checkpoints_of_equal_priority_are_evicted_in_lru_order():
    made = States(4)
    saved = [made.saved([2]) for _ in range(3)]
    made.group.renew(made.block(saved[0], 2))
    left = []
    for _ in range(4):
        made.start(1)
        left.append([bool(made.borders(each)) for each in saved])
    assert left == [[True] * 3, [True, False, True], [True, False, False], [False] * 3]


def test_new_checkpoint_outlives_unused_ones_that_were_worth_more():
    made = States(4)
    large, _ = made.saved([5]), made.saved([4])  # 20 and 16 tokens to compute again
    running = [made.start(1) for _ in range(3)]
    assert made.group._evicted_priority == 16
    for each in running:
        made.group.clear(each)
    later = made.saved([2])  # 8 tokens: priority 24
    for _ in range(3):
        made.start(1)
    assert (made.borders(large), made.borders(later)) == ([], [2])


def test_hit_renews_priority_at_present_level():
    made = States(5)
    old, used, _ = made.saved([6]), made.saved([5]), made.saved([4])  # 24, 20 and 16
    for _ in range(3):
        made.start(1)  # the third one evicts at 16
    made.group.renew(made.block(used, 5))  # 36
    made.start(1)
    assert (made.borders(old), made.borders(used)) == ([], [5])


class Scanned(StateGroup):
    """Looks at all checkpoints for each eviction."""

    def _evict(self):
        slot = min(self._cached, key=self._priority.__getitem__)
        self._evicted_priority = self._priority[slot]
        self._evict_from(self._cached, slot)
        return slot


def change_at_random(made, seed):
    """Save, find, pin, forget and quarantine checkpoints of sequences with 10 blocks; return all evicted ones."""
    rng, held = random.Random(seed), []
    for _ in range(300):
        action, cached = rng.random(), made.group.cached_ids()
        if action < 0.3 and made.group.num_free_blocks and made.pool.num_free_blocks >= 10:
            sequence = made.saved(sorted(rng.sample(range(1, 11), rng.randint(1, 4))))
            made.pool.release([made.pool.blocks[block_id] for block_id in sequence.block_table[::-1]])
        elif action < 0.7 and cached:
            made.group.renew(made.pool.blocks[made.group.block_of(rng.choice(cached))])
        elif action < 0.8 and cached:
            held.append(rng.choice(cached))
            made.group.pin([held[-1]])
        elif action < 0.97 and held:
            made.group.unpin([held.pop(rng.randrange(len(held)))])
        elif action < 0.99 and cached:
            made.group.block_forgotten(made.pool.blocks[made.group.block_of(rng.choice(cached))])
        elif cached and made.group.num_free_blocks > 4:
            made.group.quarantine(rng.choice(cached))
    return made.evicted


@pytest.mark.parametrize("seed", range(20))
def test_same_checkpoints_are_evicted_as_by_a_scan_of_all(seed):
    queued = States(12)
    evicted = change_at_random(queued, seed)
    assert evicted == change_at_random(States(12, Scanned), seed)
    assert len(evicted) > 10


def test_eviction_queue_drops_outdated_entries_if_it_is_longer_than_two_per_slot():
    made, lengths = States(4), []
    saved = made.saved([2])
    for _ in range(9):
        made.group.renew(made.block(saved, 2))
        lengths.append(len(made.group._queue))
    assert lengths == [2, 3, 4, 5, 6, 7, 8, 1, 2]


def test_renew_ignores_blocks_without_cached_checkpoint(made):
    saved = made.saved([1])
    made.group.pin([1])
    made.group.renew(made.block(saved, 1))
    made.group.renew(made.block(saved, 2))
    assert made.group.cached_ids() == []
    made.group.unpin([1])
    assert made.group.cached_ids() == [1]
