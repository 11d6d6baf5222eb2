"""Saves of models with windows: a lookup finds them from the first block on, and handovers are complete."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import SchedulerConfig
from octavo.core import invariants
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import ComputedBlocks
from octavo.core.save_plan import blocks_to_save, most_saved_blocks, whole_hit
from octavo.data import events
from octavo.data.kv_groups import NO_BLOCK, KVGroupSpec, SlidingWindow
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.scheduler_output import TransferDirection
from octavo.sampling_params import SamplingParams


class SlowStore(Store):
    """A store that keeps all saves; a save ends `num_steps` steps after its order.

    keys: complete blocks; in_part: blocks without their window parts.
    """

    def __init__(self, num_steps=0):
        super().__init__(num_tokens=0)
        self.num_steps = num_steps
        self.keys, self.in_part = set(), set()
        self.open = []

    def keys_to_save(self, keys, *, only_first_group=False):
        return set(keys) - self.keys - (self.in_part if only_first_group else set())

    def run(self, core):
        """Step until no request and no save remains."""
        for _ in range(2000):
            if not core.scheduler.has_work():
                return
            self.step(core)
        raise AssertionError("the scheduler makes no progress")

    def step(self, core):
        """Do one step and check every invariant; return the schedule."""
        scheduled = core.scheduler.schedule()
        result = core.compute(scheduled)
        self.open = [(left - 1, order) for left, order in self.open]
        self.open += [(self.num_steps, order) for order in scheduled.kv_transfers]
        ended = [order for left, order in self.open if left <= 0]
        self.open = [(left, order) for left, order in self.open if left > 0]
        for order in ended:
            assert order.direction is TransferDirection.SAVE
            assert len(order.keys) == len(order.block_ids[0]) == len(order.block_ids[1])
            for key, part in zip(order.keys, order.block_ids[1], strict=True):
                (self.in_part if part == NO_BLOCK else self.keys).add(key)
            result.kv_transfers.append(EndedTransfer(order.transfer_id, len(order.keys)))
        core.scheduler.update_from_output(scheduled, result)
        assert invariants.check(core.scheduler) == []
        return scheduled

    def num_found(self, request):
        """Return how many blocks a lookup finds from the first one on, and how many the store has in all."""
        is_there = [key in self.keys | self.in_part for key in request.block_hashes]
        return [*is_there, False].index(False), sum(is_there)


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_window_blocks", [60, 80, 400])
def test_blocks_saved_to_slow_store_form_prefix_of_prompt(make_core, num_window_blocks):
    store = SlowStore(2)
    core = make_core(
        num_blocks=400, num_window_blocks=num_window_blocks, window=20, max_num_batched_tokens=64, max_num_seqs=4,
        connector=store,
    )  # fmt: skip
    requests = [core.add(name, 301, max_tokens=4) for name in "abcd"]
    store.run(core)
    for request in requests:
        num_found, num_saved = store.num_found(request)
        assert num_found == num_saved >= 40
        assert num_saved >= 75 or num_window_blocks < 400


def test_no_store_allows_no_saved_blocks(make_core):
    assert make_core(num_window_blocks=64, window=20).scheduler.transfers.most_saved_blocks == 0


def test_save_limit_excludes_blocks_for_windows_and_step():
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=63)

    def most(num_window_blocks, num_blocks=400):
        groups = [KVGroupSpec(SlidingWindow(20), num_window_blocks)] if num_window_blocks else []
        manager = KVCacheManager(num_blocks, 4, bounded_groups=groups)
        return most_saved_blocks(manager, config)

    assert manager_share(20) == 7  # a row sees at most six blocks, and one is taken before one is released
    assert [most(count) for count in (64, 80, 90)] == [20, 36, 46]
    assert most(64, num_blocks=64) == 8, "an eighth of all blocks is the most"
    assert [most(44), most(45), most(60)] == [5, 5, 16], "or an eighth of the window blocks"
    assert most(7) == 1
    assert [most(0), most(0, 80), most(0, 7)] == [50, 10, 1], "without windows an eighth"


def manager_share(window):
    manager = KVCacheManager(400, 4, bounded_groups=[KVGroupSpec(SlidingWindow(window), 9)])
    return manager.bounded[0].num_reserved(400)


def test_block_without_window_part_is_saved_in_part_unless_store_has_it():
    manager, store = KVCacheManager(16, 4, bounded_groups=[KVGroupSpec(SlidingWindow(40), 16)]), SlowStore()
    request = Request("a", list(range(20)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 20)
    windows, sequence = manager.bounded[0], request.sequence
    parts = [sequence.block_tables[1][index] for index in (0, 2, 4)]
    blocks = [sequence.block_table[index] for index in (0, 2, 4)]
    assert blocks_to_save(manager, request, [0, 2, 4], store) == ([0, 2, 4], [blocks, parts])
    request.num_computed_tokens = 20
    manager.commit(request)
    manager.free(request)
    other = Request("b", list(range(20)), SamplingParams())
    manager.add_tables(other)
    computed = manager.get_computed_blocks(other)
    for index in (1, 2):
        windows.block_forgotten(computed.blocks[index])  # as if its part were evicted
    other.sequence.block_tables[0] += [block.block_id for block in computed.blocks]
    assert blocks_to_save(manager, other, [0, 1, 2, 3], store) == (
        [0, 1, 2, 3],
        [[0, 1, 2, 3], [0, NO_BLOCK, NO_BLOCK, 3]],
    )
    store.in_part.add(other.block_hashes[2])
    assert blocks_to_save(manager, other, [0, 1, 2, 3], store) == ([0, 1, 3], [[0, 1, 3], [0, NO_BLOCK, 3]])
    store.keys_to_save = lambda *_, **__: pytest.fail("it was asked of nothing")
    assert blocks_to_save(manager, other, [0, 3], store) == ([0, 3], [[0, 3], [0, 3]])


class TestRoom:
    """Saves pin at most 25 of 200 blocks at a time, with at most as many parts as free window blocks allow."""

    @pytest.fixture
    def transfers(self, make_core):
        transfers = make_donor(make_core, SlowStore(1000), 48).scheduler.transfers
        assert transfers.most_saved_blocks == 12
        return transfers

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ([1] * 9, 9),
            ([1] * 13, 12),
            ([NO_BLOCK] * 30, 25),
            ([NO_BLOCK] * 5 + [1] * 20, 17),
            ([1] * 12 + [NO_BLOCK] * 9 + [1], 21),
            ([1] * 3 + [NO_BLOCK] * 30, 25),
            ([], 0),
        ],
    )
    def test_save_ends_at_limit_of_blocks_or_window_parts(self, transfers, parts, expected):
        assert transfers._num_fitting([part != NO_BLOCK for part in parts]) == expected

    def test_saves_in_flight_count_against_both_limits(self, transfers):
        transfers._saving.start(range(8))
        transfers._saving_in_part.start(range(20, 27))
        assert transfers._num_fitting([False] * 20) == 10
        assert transfers._num_fitting([True] * 20) == 4
        transfers._saving.start(range(30))  # a handover has no limit
        assert transfers._num_fitting([False] * 20) == 0
        assert transfers._num_fitting([True] * 20) == 0

    @pytest.mark.parametrize(
        ("num_in_full", "num_in_part", "is_asked"), [(11, 13, True), (12, 12, True), (12, 13, False), (0, 25, False)]
    )
    def test_store_is_queried_while_limits_allow_partial_save(self, transfers, num_in_full, num_in_part, is_asked):
        """Blocks that the store has completely may precede blocks saved in part. Handovers have no limit."""
        transfers._saving.start(range(num_in_full))
        transfers._saving_in_part.start(range(100, 100 + num_in_part))
        for name, params in (("a", None), ("b", donor_params("b"))):
            request = Request(name, list(range(9)), SamplingParams(), kv_transfer_params=params)
            transfers._manager.add_tables(request)
            transfers._manager.allocate_slots(request, 8)
            request.num_computed_tokens = 8
            transfers._manager.commit(request)
            asked = []
            transfers._connector.keys_to_save = lambda keys, asked=asked, **_: asked.append(keys) or set()
            transfers.offer(request)
            assert bool(asked) == (is_asked or params is not None)


def test_delayed_save_omits_window_part_lost_while_waiting(make_core):
    store = SlowStore()
    core = make_donor(make_core, store, 200)
    request = core.add("a", 200, max_tokens=60)
    store.step(core)
    store.step(core)
    windows, pool = core.scheduler.kv_cache_manager.bounded[0], core.scheduler.kv_cache_manager.pool
    transfers = core.scheduler.transfers
    transfers.most_saved_blocks = 0
    store.step(core)
    store.step(core)
    assert request.num_computed_tokens == 128
    assert store.num_found(request) == (16, 16)
    lost = request.sequence.block_table[18]
    windows.block_forgotten(pool.blocks[lost])  # as if its part were evicted
    transfers.most_saved_blocks = 100
    store.run(core)
    assert store.num_found(request) == (64, 64)
    assert store.in_part == {request.block_hashes[18]}
    assert (len(transfers._saving), len(transfers._saving_in_part)) == (0, 0)


class TestSavedInPart:
    """Ten blocks are cached. Three have lost their window parts and are being saved without them."""

    @pytest.fixture
    def store(self):
        return SlowStore()

    @pytest.fixture
    def core(self, make_core, store):
        core = make_donor(make_core, store, 90)
        core.add("a", list(range(41)), max_tokens=1)
        store.run(core)
        store.keys.clear()  # the store evicted them
        manager = core.scheduler.kv_cache_manager
        for index in (2, 3, 4):
            manager.bounded[0].block_forgotten(manager.pool.blocks[index])  # as if its part were evicted
        store.num_steps = 1000
        self.add(core, "b", 5)
        return core

    def add(self, core, name, token, params=None):
        """Add a request with the same beginning and step until its saves are ordered; return it."""
        request = core.add(name, [*range(41), token], max_tokens=9, kv_transfer_params=params)
        for _ in range(3):
            core.step()
        return request

    def test_blocks_being_saved_in_part_are_not_ordered_again(self, core):
        [saved] = core.log.of_type(events.KVSaveStarted)[-1:]
        transfers = core.scheduler.transfers
        assert saved.num_blocks == 10
        assert (len(transfers._saving), len(transfers._saving_in_part)) == (7, 3)
        self.add(core, "c", 6)
        assert core.log.of_type(events.KVSaveStarted)[-1] is saved

    def test_handover_recomputes_blocks_being_saved_in_part(self, core):
        request = self.add(core, "c", 6, donor_params("c"))
        assert request.sequence.num_cached_tokens == 8
        saves = [each.num_blocks for each in core.log.of_type(events.KVSaveStarted)]
        assert saves[-2:] == [10, 3], "what is being saved in part is handed over whole"

    def test_partial_save_ends_without_affecting_complete_save_of_block(self, core):
        request = self.add(core, "c", 6, donor_params("c"))
        transfers = core.scheduler.transfers
        in_part = core.log.of_type(events.KVSaveStarted)[-2]
        transfers.end(EndedTransfer(in_part.transfer_id, 10))
        assert len(transfers._saving_in_part) == 0
        assert transfers._saving.lacking(request.block_hashes) == {*request.block_hashes} - {*request.block_hashes[2:5]}
        assert invariants.check(core.scheduler) == []


# --- handed over ------------------------------------------------------------------------------------------------------


def make_donor(make_core, store, num_window_blocks=40, **options):
    return make_core(
        num_blocks=200, num_window_blocks=num_window_blocks, window=20, max_num_batched_tokens=32, max_num_seqs=4,
        connector=store, **options,
    )  # fmt: skip


def donor_params(name):
    return KVTransferParams(name, is_prefill=True)


@pytest.mark.parametrize(("num_window_blocks", "num_found"), [(40, 12), (60, 120)])
def test_handover_is_complete_despite_lost_window_parts_of_hit(make_core, num_window_blocks, num_found):
    store = SlowStore()
    core = make_donor(make_core, store, num_window_blocks)
    beginning = list(range(121))
    for name, prompt in (("a", [*beginning, 1]), ("b", 100)):
        core.add(name, prompt, max_tokens=1, kv_transfer_params=donor_params(name))
        store.run(core)
    store.keys.clear()  # the store evicted the handed over blocks
    request = core.add("c", [*beginning, *[2] * 8], max_tokens=1, kv_transfer_params=donor_params("c"))
    store.run(core)
    assert request.sequence.num_cached_tokens == num_found
    assert store.num_found(request) == (32, 32)


def test_handover_uses_hit_without_window_parts_if_store_has_blocks(make_core):
    store = SlowStore()
    core = make_donor(make_core, store)
    beginning = list(range(121))
    for name, prompt in (("a", [*beginning, 1]), ("b", 100)):
        core.add(name, prompt, max_tokens=1, kv_transfer_params=donor_params(name))
        store.run(core)
    request = core.add("c", [*beginning, *[2] * 8], max_tokens=1, kv_transfer_params=donor_params("c"))
    store.run(core)
    assert request.sequence.num_cached_tokens == 120
    assert store.num_found(request) == (32, 32)


def test_handover_saves_hit_blocks_in_step_of_admission(make_core):
    store = SlowStore()
    core = make_donor(make_core, store, 60)
    core.add("a", list(range(41)), max_tokens=1)
    store.run(core)
    store.keys.clear()
    store.keys.add(core.scheduler.kv_cache_manager.pool.blocks[3].hash)
    request = core.add("b", [*range(41), 5], max_tokens=4, kv_transfer_params=donor_params("b"))
    scheduled = core.scheduler.schedule()
    [order] = scheduled.kv_transfers
    assert scheduled.num_scheduled_tokens == {"b": 2}
    assert order.keys == [request.block_hashes[index] for index in range(10) if index != 3]
    assert order.block_ids[0] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert order.block_ids[1] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    num_saves = len(core.log.of_type(events.KVSaveStarted))
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    core.step()
    assert len(core.log.of_type(events.KVSaveStarted)) == num_saves, "what is being saved is not ordered again"


def test_request_without_handover_uses_hit_without_window_part(make_core):
    store = SlowStore()
    core = make_donor(make_core, store, 60)
    core.add("a", list(range(41)), max_tokens=1)
    store.run(core)
    store.keys.clear()
    manager = core.scheduler.kv_cache_manager
    manager.bounded[0].block_forgotten(manager.pool.blocks[0])  # as if its part were evicted
    request = core.add("b", [*range(41), 5], max_tokens=1)
    assert core.scheduler.schedule().kv_transfers == []
    assert request.sequence.num_cached_tokens == 40


def test_swapped_handover_request_resumes_with_all_tokens(make_core):
    store = SlowStore()
    core = make_donor(make_core, store, 60, num_host_blocks=50, preemption="swap")
    request = core.add("a", list(range(60)), max_tokens=9, kv_transfer_params=donor_params("a"))
    for _ in range(4):
        store.step(core)
    num_computed = request.num_computed_tokens
    core.scheduler.faults.preempt(["a"])
    store.step(core)
    store.keys.clear()
    manager = core.scheduler.kv_cache_manager
    manager.bounded[0].block_forgotten(manager.pool.blocks[0])  # as if its part were evicted
    assert store.step(core).copies.swap_in != []
    assert request.num_computed_tokens == num_computed + 1


class TestWholeHit:
    """One request computed twelve tokens. Another one finds their three blocks; its next row reads the last two."""

    @pytest.fixture
    def manager(self):
        return KVCacheManager(16, 4, bounded_groups=[KVGroupSpec(SlidingWindow(6), 16)])

    @pytest.fixture
    def found(self, manager):
        first = Request("a", list(range(12)), SamplingParams())
        manager.add_tables(first)
        manager.allocate_slots(first, 12)
        first.num_computed_tokens = 12
        manager.commit(first)
        manager.free(first)
        request = Request("b", list(range(13)), SamplingParams())
        return request, manager.get_computed_blocks(request)

    def test_hit_is_unchanged_if_store_has_every_block_without_part(self, manager, found):
        request, computed = found
        manager.bounded[0].block_forgotten(computed.blocks[0])
        assert whole_hit(manager, request, computed, set()) is computed
        assert whole_hit(manager, request, computed, set(request.block_hashes[1:])) is computed

    @pytest.mark.parametrize(("lost", "expected"), [(0, 0), (1, 1), (2, 2)])
    def test_hit_ends_at_block_without_window_part_missing_in_store(self, manager, found, lost, expected):
        request, computed = found
        assert computed.num_tokens == 12
        manager.bounded[0].block_forgotten(computed.blocks[lost])
        cut = whole_hit(manager, request, computed, {request.block_hashes[lost]})
        assert cut == ComputedBlocks(computed.blocks[:expected], 4 * expected, num_shared=3)

    def test_shortened_hit_requires_window_parts_of_next_row(self, manager, found):
        request, computed = found
        for index in (1, 2):
            manager.bounded[0].block_forgotten(computed.blocks[index])
        assert whole_hit(manager, request, computed, {request.block_hashes[2]}).num_tokens == 4

    def test_hit_ends_at_host_block_missing_in_store(self, manager, found):
        request, computed = found
        in_host = ComputedBlocks(computed.blocks[:2], 12, host_blocks=[0])
        assert whole_hit(manager, request, in_host, set(request.block_hashes[:2])) is in_host
        assert whole_hit(manager, request, in_host, {request.block_hashes[2]}).num_tokens == 8


def test_block_with_one_lost_part_is_saved_with_first_group_only():
    groups = [KVGroupSpec(SlidingWindow(40), 16), KVGroupSpec(SlidingWindow(30), 16)]
    manager, store = KVCacheManager(16, 4, bounded_groups=groups), SlowStore()
    request = Request("a", list(range(12)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 12)
    tables = request.sequence.block_tables
    tables[1][0], tables[2][0] = 7, 8
    assert blocks_to_save(manager, request, [0, 1], store) == ([0, 1], [[0, 1], [7, 1], [8, 1]])
    request.num_computed_tokens = 12
    manager.commit(request)
    request.sequence.first_held[2] = 1
    manager.bounded[1].block_forgotten(manager.pool.blocks[0])  # as if its part were evicted
    expected = [[0, 1], [NO_BLOCK, 1], [NO_BLOCK, 1]]
    assert blocks_to_save(manager, request, [0, 1], store) == ([0, 1], expected)


def test_handover_hit_requires_parts_in_every_group():
    groups = [KVGroupSpec(SlidingWindow(6), 16), KVGroupSpec(SlidingWindow(6), 16)]
    manager = KVCacheManager(16, 4, bounded_groups=groups)
    first, request = (Request(name, list(range(12 + extra)), SamplingParams()) for name, extra in (("a", 0), ("b", 1)))
    manager.add_tables(first)
    manager.allocate_slots(first, 12)
    first.num_computed_tokens = 12
    manager.commit(first)
    manager.free(first)
    found = manager.get_computed_blocks(request)
    assert found.num_tokens == 12
    assert whole_hit(manager, request, found, set(request.block_hashes)).num_tokens == 12
    manager.bounded[1].block_forgotten(found.blocks[0])  # as if its part were evicted
    assert whole_hit(manager, request, found, set(request.block_hashes)).num_tokens == 0
