"""Checkpoints of recurrent states in the cache manager: planned at a start, copied to a slot, found after a commit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import NO_COMPUTED_BLOCKS, ComputedBlocks, FullBlocks
from octavo.data.events import CheckpointEvicted, CheckpointSaved
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates, SlidingWindow
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams

STATES = KVGroupSpec(RecurrentStates(), 8)


class Made:
    """A manager with blocks of 4 tokens, and what it emitted."""

    def __init__(self, num_blocks=40, groups=(STATES,), interval=None, **options):
        self.emitted = []
        self.manager = KVCacheManager(
            num_blocks, 4, bounded_groups=groups, checkpoint_interval=interval, emit=self.emit, **options
        )
        self.group, self.checkpoints = self.manager.states, self.manager.checkpoints

    def emit(self, kind, *fields):
        if kind in (CheckpointSaved, CheckpointEvicted):
            self.emitted.append((kind, *fields))

    def request(self, name, tokens, **options):
        """Return a new request with empty block tables. tokens: its prompt, or the number of its tokens."""
        prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
        request = Request(name, prompt, SamplingParams(), **options)
        self.manager.add_tables(request)
        return request

    def start(self, request, num_tokens=None):
        """Look up and allocate; return the prefix hit, or None if too little is free."""
        computed = self.manager.get_computed_blocks(request)
        count = (num_tokens or request.num_tokens) - computed.num_tokens
        allocated = self.manager.allocate_slots(request, count, computed)
        request.num_computed_tokens = computed.num_tokens
        return None if allocated is None else computed

    def compute(self, request, num_tokens):
        """Compute a request's tokens before `num_tokens` in one step; return the saves of the step."""
        saves = self.checkpoints.plan(request, num_tokens)
        request.num_computed_tokens = num_tokens
        self.manager.commit(request)
        return [border for border, _ in saves]

    def run(self, name, tokens, **options):
        """Start, compute and free a request; return its hit in tokens, and the numbers of tokens of its saves."""
        request = self.request(name, tokens, **options)
        num_found = self.start(request).num_tokens
        saves = self.compute(request, request.num_tokens)
        self.manager.free(request)
        return num_found, saves

    @property
    def copies(self):
        return self.manager.take_copies().block_copies


@pytest.fixture
def made():
    return Made()


def test_manager_without_recurrent_group_has_no_checkpoints():
    made = Made(groups=[KVGroupSpec(SlidingWindow(4), 8)])
    assert (made.manager.states, made.manager.checkpoints) == (None, None)
    request = made.request("a", 9)
    made.start(request)
    assert len(request.sequence.block_tables[1]) == 3
    assert request.sequence.num_slots == 12


def test_recurrent_group_follows_windows_and_bounds_no_tokens():
    made = Made(groups=[KVGroupSpec(SlidingWindow(4), 8), KVGroupSpec(RecurrentStates(), 2)])
    manager = made.manager
    assert [group.index for group in manager.groups] == [0, 1, 2]
    assert (manager.bounded, manager.states) == ([manager.groups[1]], manager.groups[2])
    assert (manager.states.kind, manager.states.num_blocks) == (RecurrentStates(), 2)
    request = made.request("a", 9)
    made.start(request)
    assert [len(table) for table in request.sequence.block_tables] == [3, 3, 1]
    assert request.sequence.num_slots == 12
    assert manager.bounded_usage == manager.bounded[0].usage == 3 / 8
    assert manager.has_free(5)
    assert not manager.has_free(6)


def test_admission_waits_for_a_free_slot():
    made = Made(groups=[KVGroupSpec(RecurrentStates(), 1)])
    first, second = made.request("a", 9), made.request("b", 7)
    made.start(first)
    assert not made.manager.can_hold(7, NO_COMPUTED_BLOCKS, 0)
    assert made.start(second) is None
    assert (second.sequence.block_tables, made.manager.pool.num_free_blocks) == ([[], []], 37)
    made.manager.free(first)
    assert made.manager.can_hold(7, NO_COMPUTED_BLOCKS, 30)
    assert made.start(second) is not None


def test_first_request_saves_last_full_block_and_growing_distances(made):
    assert made.run("a", 85) == (0, [20, 68, 84])
    assert made.emitted == [(CheckpointSaved, "a", count) for count in (20, 68, 84)]


@pytest.mark.parametrize(
    ("interval", "saves"),
    [(1, [*range(4, 24, 4)]), (7, [*range(4, 24, 4)]), (8, [8, 16, 20]), (11, [8, 16, 20]), (12, [12, 20])],
)
def test_interval_is_rounded_down_to_whole_blocks(interval, saves):
    made = Made(interval=interval)
    assert made.checkpoints.interval == interval
    assert made.run("a", 22) == (0, saves)


def test_hit_ends_at_checkpoint_and_is_copied_to_slot_of_request(made):
    made.run("a", 25)  # saves 8 and 24
    assert made.copies == []
    second = made.request("b", [*range(23), 0, 0, 0])
    computed = made.start(second)
    [slot] = second.sequence.block_tables[1]
    checkpoint = made.group.id_of(computed.blocks[-1])
    assert (computed.num_tokens, len(computed.blocks), computed.num_shared) == (8, 2, 5)
    assert made.copies == [(1, checkpoint, slot)]
    assert slot != checkpoint
    assert second.sequence.num_cached_tokens == 8
    assert second.sequence.block_table[:2] == [block.block_id for block in computed.blocks]


def test_request_without_hit_copies_no_state(made):
    made.run("a", 25)
    other = made.request("b", [9] * 25)
    assert made.start(other).num_tokens == 0
    assert made.copies == []


def test_state_is_saved_where_prompt_leaves_cached_blocks(made):
    made.run("a", 25)
    assert made.run("b", [*range(23), 0, 0, 0]) == (8, [20, 24])
    assert made.run("c", [*range(21), 0, 0, 0, 0]) == (20, [24])


def test_equal_prompt_starts_at_last_checkpoint_and_saves_nothing(made):
    made.run("a", 25)
    assert made.run("b", 25) == (24, [])
    assert made.run("c", 24) == (8, [20, 24])  # its last token is computed, so it cannot start at 24
    assert made.run("d", 24) == (20, [24])
    assert len(made.group.cached_ids()) == 3


def test_cache_point_is_saved():
    made = Made(interval=1000)
    assert made.run("a", 25, cache_points=(13, 90)) == (0, [12, 24])
    assert made.run("b", [*range(13), 0, 0]) == (12, [])


def test_disabled_prefix_cache_saves_nothing():
    made = Made(enable_prefix_caching=False)
    assert made.run("a", 25, cache_points=(13,)) == (0, [])
    assert made.run("b", 25) == (0, [])
    assert made.emitted == []
    assert made.group.num_free_blocks == 8


def test_request_that_may_not_read_cache_saves_for_others(made):
    request = made.request("a", 25)
    request.reads_prefix_cache = False
    made.start(request)
    assert made.manager.prefix_cache._saving == {}
    assert made.compute(request, 25) == [8, 24]
    assert made.run("b", 25) == (24, [])


def test_restart_saves_states_of_generated_tokens_too(made):
    request = made.request("a", 9)
    made.start(request)
    made.compute(request, 9)
    made.manager.release(request)
    assert request.sequence.saves.due == []
    request.sequence.token_ids += [7] * 9
    assert made.start(request).num_tokens == 8
    assert request.sequence.saves.due == [4]
    assert made.compute(request, 18) == [16]


def test_decoded_tokens_are_saved_only_if_they_are_cached():
    found = []
    for cache_decoded_blocks in (True, False):
        made = Made(cache_decoded_blocks=cache_decoded_blocks)
        request = made.request("a", 9)
        made.start(request, 40)
        saves = [made.compute(request, 9)]
        for num_tokens in range(10, 20):
            request.sequence.token_ids.append(7)
            saves.append(made.compute(request, num_tokens))
        made.manager.release(request)
        made.start(request)
        found.append(([each for each in saves if each], request.num_computed_tokens, request.sequence.saves.due))
    assert found == [([[8], [12], [16]], 16, []), ([[8]], 8, [])]


def test_only_newest_state_of_decoded_tokens_is_kept(made):
    request = made.request("a", 9)
    made.start(request, 40)
    made.compute(request, 9)
    for num_tokens in range(10, 30):
        request.sequence.token_ids.append(7)
        made.compute(request, num_tokens)
    assert [count for _, _, count in made.emitted] == [8, 12, 16, 20, 24, 28]
    parts = made.group.parts()
    ends = [index for index, block_id in enumerate(request.sequence.block_table, 1) if block_id in parts]
    assert ends == [2, 7]


def test_state_of_uncommitted_blocks_is_not_found(made):
    first, second = made.request("a", 25), made.request("b", 25)
    made.start(first)
    assert made.checkpoints.plan(first, 25) == [(8, 1), (24, 2)]
    assert made.start(second).num_tokens == 0
    made.manager.free(second)
    made.manager.free(first)  # as after a failed step
    assert made.manager.get_computed_blocks(made.request("c", 25)).num_tokens == 0
    assert (made.group.num_free_blocks, made.emitted, made.group.parts()) == (8, [], {})


def test_commit_reports_saves_of_committed_blocks_only(made):
    request = made.request("a", 25)
    made.start(request)
    made.checkpoints.plan(request, 25)
    request.num_computed_tokens = 12
    made.manager.commit(request)
    assert made.emitted == [(CheckpointSaved, "a", 8)]
    assert made.manager.get_computed_blocks(made.request("b", 25)).num_tokens == 8


def test_evicted_checkpoint_may_become_slot_of_the_request_that_found_it():
    made = Made(groups=[KVGroupSpec(RecurrentStates(), 2)])
    assert made.run("a", 9) == (0, [8])
    other = made.request("b", [5] * 3)
    made.start(other)
    second = made.request("c", 9)
    assert made.start(second).num_tokens == 8
    assert made.copies == []  # the state is there already
    assert made.emitted[-1] == (CheckpointEvicted, second.sequence.block_table[1])
    assert made.group.parts() == {}


def test_found_checkpoint_is_last_of_its_worth_to_be_evicted():
    made = Made(groups=[KVGroupSpec(RecurrentStates(), 3)])
    made.run("a", 9)
    made.run("b", [5] * 9)
    second = made.request("c", 9)
    assert made.start(second).num_tokens == 8
    assert made.copies == [(1, 1, 0)]
    made.start(made.request("d", [6] * 3))
    assert made.emitted[-1][0] is CheckpointEvicted
    assert [made.manager.get_computed_blocks(made.request("e", each)).num_tokens for each in (9, [5] * 9)] == [8, 0]


def test_hit_without_checkpoint_raises(made):
    made.run("a", 25)
    computed = made.manager.get_computed_blocks(made.request("b", 25))
    made.group.block_forgotten(computed.blocks[-1])
    with pytest.raises(AssertionError, match="a prefix hit does not end at a checkpoint"):
        made.checkpoints.find(computed)
    assert made.checkpoints.find(NO_COMPUTED_BLOCKS) == (None, None)


def test_eviction_of_block_frees_its_checkpoint():
    made = Made(num_blocks=8)
    made.run("a", 9)
    assert made.group.cached_ids() != []
    made.start(made.request("b", [5] * 32))
    assert (made.group.cached_ids(), made.group.num_free_blocks) == ([], 7)
    assert made.emitted == [(CheckpointSaved, "a", 8)]  # the block was evicted, not the checkpoint


def test_reset_frees_checkpoints(made):
    made.run("a", 25)
    assert made.manager.reset_prefix_cache()
    assert (made.group.parts(), sorted(made.group.free_ids())) == ({}, [*range(8)])
    assert made.run("b", 25) == (0, [8, 24])


def test_hit_satisfies_windows_and_checkpoints():
    made = Made(groups=[KVGroupSpec(SlidingWindow(5), 20), STATES], interval=8)
    made.run("a", 25)  # saves 8, 16 and 24
    bounded, blocks = made.manager.bounded[0], made.manager.get_computed_blocks(made.request("b", 25)).blocks
    assert len(blocks) == 6
    bounded.block_forgotten(blocks[5])
    assert made.manager.get_computed_blocks(made.request("c", 25)).num_tokens == 16
    bounded.block_forgotten(blocks[3])
    assert made.manager.get_computed_blocks(made.request("d", 25)).num_tokens == 8
    made.group.block_forgotten(blocks[1])
    assert made.manager.get_computed_blocks(made.request("e", 25)).num_tokens == 0


@pytest.mark.parametrize(("num_usable", "host_blocks"), [(2, []), (3, []), (5, [3, 4])])
def test_hit_takes_blocks_of_host_memory_up_to_its_checkpoint(made, num_usable, host_blocks):
    on_device, in_host = ([SimpleNamespace(block_id=i, name=(i, 0)) for i in ids] for ids in (range(3), range(3, 6)))
    full = FullBlocks(on_device, in_host, num_usable, 6, None)
    hit = made.manager.prefix_cache.computed_blocks(made.request("a", 25), full)
    assert (len(hit.blocks), hit.host_blocks) == (min(num_usable, 3), host_blocks)
    assert (hit.num_tokens, hit.state_name) == (4 * num_usable, (num_usable - 1, 0))


def test_last_token_of_prompt_is_never_counted_as_cached_and_unusable():
    made = Made(groups=[KVGroupSpec(SlidingWindow(5), 20)])
    shared = ComputedBlocks([], 0, num_shared=3)
    assert made.manager.prefix_cache.num_unusable_tokens(made.request("a", 12), shared) == 11
    assert made.manager.prefix_cache.num_unusable_tokens(made.request("b", 25), shared) == 12
