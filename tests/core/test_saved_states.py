"""Saves of recurrent states: their choice, their limits, and handovers to another engine."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig
from octavo.core import invariants
from octavo.core.event_emitter import EventEmitter
from octavo.core.kv.manager import KVCacheManager
from octavo.core.save_plan import hit_with_state, most_saved_states, states_to_save
from octavo.core.transfer_scheduler import KVTransferScheduler
from octavo.data.events import NullSink
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams

SIZE = 4


class Stored:
    """A connector to a store with the states after some blocks."""

    def __init__(self, keys=()):
        self.keys = set(keys)

    def states_to_save(self, keys):
        return set(keys) - self.keys


def make_manager(num_states=8, num_host_states=0, num_host_blocks=0, num_blocks=32):
    states = KVGroupSpec(RecurrentStates(), num_states, num_host_states)
    return KVCacheManager(
        num_blocks, SIZE, bounded_groups=[states], checkpoint_interval=SIZE, num_host_blocks=num_host_blocks
    )  # fmt: skip


def compute(manager, name, num_tokens):
    """Compute a prompt in one step. Its states after all blocks are saved."""
    request = Request(name, list(range(num_tokens)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, num_tokens)
    manager.checkpoints.plan(request, num_tokens)
    request.num_computed_tokens = num_tokens
    manager.commit(request)
    return request


@pytest.fixture
def manager():
    return make_manager()


def test_checkpoints_that_the_store_lacks_are_saved(manager):
    request = compute(manager, "a", 14)
    slots = [manager.checkpoints.slot_after(block) for block in request.sequence.block_table[:3]]
    assert None not in slots
    assert states_to_save(manager, request, range(3), Stored()) == dict(enumerate(slots))
    assert states_to_save(manager, request, range(3), Stored(request.block_hashes[:2])) == {2: slots[2]}
    manager.states.block_forgotten(manager.pool.blocks[request.sequence.block_table[1]])
    assert states_to_save(manager, request, range(3), Stored()) == {0: slots[0], 2: slots[2]}


def test_checkpoint_of_equal_block_is_found(manager):
    first = compute(manager, "a", 14)
    second = Request("b", list(range(14)), SamplingParams())
    manager.add_tables(second)
    manager.allocate_slots(second, 14)
    second.num_computed_tokens = 14
    manager.commit(second)
    slots = states_to_save(manager, first, range(3), Stored())
    assert states_to_save(manager, second, range(3), Stored()) == slots
    assert not set(first.sequence.block_table) & set(second.sequence.block_table)


def test_model_without_states_saves_none():
    manager = KVCacheManager(32, SIZE)
    request = Request("a", list(range(9)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    assert manager.commit(request) == []
    assert states_to_save(manager, request, range(2), Stored()) == {}
    assert manager.most_loaded_tokens(8) == 8


@pytest.mark.parametrize(("num_states", "expected"), [(4, 1), (5, 1), (9, 5)])
def test_saves_pin_only_states_that_requests_do_not_need(num_states, expected):
    config = SchedulerConfig(max_num_seqs=4).resolved("cpu", has_drafts=False)
    assert most_saved_states(make_manager(num_states), config) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_load_leaves_a_token_to_compute(manager, num_tokens, expected):
    assert manager.most_loaded_tokens(num_tokens) == expected


class TestHandover:
    """The prompt of a handed-over request is in the prefix cache."""

    @pytest.fixture
    def hit(self, manager):
        manager.free(compute(manager, "a", 14))
        request = Request("b", list(range(14)), SamplingParams())
        manager.add_tables(request)
        return request, manager.get_computed_blocks(request)

    def test_state_at_end_of_hit_is_saved(self, manager, hit):
        request, computed = hit
        assert computed.num_tokens == 12
        slot = manager.states.id_of(computed.blocks[-1])
        assert hit_with_state(manager, request, computed, Stored(), set()) == (computed, slot)

    def test_stored_or_saving_state_is_not_saved_again(self, manager, hit):
        request, computed = hit
        last = {request.block_hashes[2]}
        assert hit_with_state(manager, request, computed, Stored(last), set()) == (computed, None)
        assert hit_with_state(manager, request, computed, Stored(), last) == (computed, None)

    def test_state_after_earlier_block_is_not_needed(self, manager, hit):
        _, computed = hit
        longer = Request("c", list(range(17)), SamplingParams())
        assert hit_with_state(manager, longer, computed, Stored(), set()) == (computed, None)

    def test_hit_with_state_in_host_memory_is_shortened(self):
        """The request then computes the state, and saves it."""
        manager = make_manager(num_host_states=2, num_host_blocks=8)
        manager.free(compute(manager, "a", 14))
        request = Request("b", list(range(14)), SamplingParams())
        manager.add_tables(request)
        block = manager.get_computed_blocks(request).blocks[-1]
        manager.checkpoints.host.keep(block.name)
        manager.states.block_forgotten(block)
        computed = manager.get_computed_blocks(request)
        assert (computed.num_tokens, computed.state_name) == (12, block.name)
        cut, slot = hit_with_state(manager, request, computed, Stored(), set())
        assert (cut.num_tokens, cut.state_name, slot) == (8, computed.blocks[1].name, None)
        assert cut.num_shared == computed.num_shared == 3


def test_loaded_state_is_copied_to_a_checkpoint_in_the_next_step(manager):
    request = Request("a", list(range(22)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 12, is_loaded=True)
    manager.take_copies()
    manager.pin(1, [request.sequence.block_tables[0]], request.sequence.block_tables[1])
    manager.unpin(1)
    request.num_computed_tokens = 12
    manager.note_loaded(request)
    manager.commit(request)
    last = request.sequence.block_table[2]
    assert manager.checkpoints.slot_after(last) is None
    manager.allocate_slots(request, 10)
    ((slot,), saves) = request.sequence.block_tables[1], manager.checkpoints.plan(request, 22)
    ((group, source, target),) = manager.take_copies().block_copies
    assert (group, source) == (1, slot)
    assert [num_tokens for num_tokens, _ in saves] == [16, 20]
    assert manager.checkpoints.slot_after(last) is None
    request.num_computed_tokens = 22
    manager.commit(request)
    assert manager.checkpoints.slot_after(last) == target
    manager.free(request)
    assert manager.states.num_free_blocks == 8
    assert list(invariants._check_index(manager)) == []


def test_loaded_state_is_not_copied_without_a_free_slot():
    manager = make_manager(num_states=1)
    request = Request("a", list(range(14)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 12, is_loaded=True)
    request.num_computed_tokens = 12
    manager.note_loaded(request)
    assert manager.checkpoints.plan(request, 14) == []
    assert not manager.take_copies()
    assert request.sequence.saves.num_stored == 13


class Connector(Stored):
    """A store that lacks all blocks and states, and finds none."""

    name = "store"

    def __init__(self):
        super().__init__()
        self.orders = []

    def request_added(self, request):
        pass

    def request_finished(self, request, block_ids):
        pass

    def transfer_ended(self, transfer, num_blocks):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0

    def keys_to_save(self, keys, *, only_first_group=False):
        del only_first_group
        return set(keys)

    def transfer_ordered(self, transfer):
        self.orders.append(transfer)


@pytest.fixture
def offering():
    """Transfers that pin at most three states; the manager has eight slots."""
    manager, connector = make_manager(num_blocks=80), Connector()
    config = SchedulerConfig(max_num_seqs=5, min_tokens_to_cache=4).resolved("cpu", has_drafts=False)
    return manager, connector, KVTransferScheduler(connector, manager, config, EventEmitter(NullSink()))


def test_states_after_first_blocks_are_left_out_if_too_many_are_pinned(offering):
    manager, connector, transfers = offering
    transfers.offer(compute(manager, "a", 18))
    (order,) = connector.orders
    assert (len(order.keys), list(order.states)) == (4, [1, 2, 3])
    other = Request("b", list(range(50, 64)), SamplingParams())
    manager.add_tables(other)
    manager.allocate_slots(other, 14)
    manager.checkpoints.plan(other, 14)
    other.num_computed_tokens = 14
    manager.commit(other)
    transfers.offer(other)
    assert [(len(each.keys), each.states) for each in connector.orders[1:]] == [(3, {})]


def test_states_within_the_limit_are_all_saved(offering):
    manager, connector, transfers = offering
    request = compute(manager, "a", 10)
    transfers.offer(request)
    slots = [manager.checkpoints.slot_after(block) for block in request.sequence.block_table[:2]]
    assert [order.states for order in connector.orders] == [dict(enumerate(slots))]


def test_states_saved_after_their_blocks_were_offered_are_offered_with_them(offering):
    manager, connector, transfers = offering
    request = Request("a", list(range(14)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 14)
    request.num_computed_tokens = 14
    transfers.offer(request, manager.commit(request))
    manager.checkpoints.plan(request, 14)
    saved = manager.commit(request)
    assert saved == [1, 2, 3]
    transfers.offer(request, saved)
    slots = [manager.checkpoints.slot_after(block) for block in request.sequence.block_table[:3]]
    assert [(order.keys, order.states) for order in connector.orders] == [
        (request.block_hashes, {}),
        (request.block_hashes, dict(enumerate(slots))),
    ]
    transfers.offer(request)
    assert len(connector.orders) == 2
    for index, order in enumerate(connector.orders):
        assert len(transfers._saving) == 6 - 3 * index
        assert transfers._saving.lacking(request.block_hashes) == set()
        transfers.end(EndedTransfer(order.transfer_id, 3))
    assert len(transfers._saving) == 0


def test_states_of_offered_blocks_wait_until_the_limits_allow_their_save(offering):
    manager, connector, transfers = offering
    most_pinned, transfers._most_pinned = transfers._most_pinned, 0
    request = Request("a", list(range(14)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 14)
    transfers._num_offered["a"] = 2
    manager.checkpoints.plan(request, 14)
    request.num_computed_tokens = 14
    transfers.offer(request, manager.commit(request))
    assert connector.orders == []
    transfers._most_pinned = most_pinned
    transfers.request_finished(request)
    assert [list(order.states) for order in connector.orders] == [[0, 1, 2]]


def test_request_that_computes_offered_blocks_again_offers_only_computed_ones(offering):
    manager, connector, transfers = offering
    request = Request("a", list(range(14)), SamplingParams())
    manager.add_tables(request)
    manager.allocate_slots(request, 8)
    transfers._num_offered["a"] = 3
    manager.checkpoints.plan(request, 8)
    request.num_computed_tokens = 8
    transfers.offer(request, manager.commit(request))
    assert [(order.keys, list(order.states)) for order in connector.orders] == [(request.block_hashes[:2], [0, 1])]


def test_state_after_accepted_drafts_is_offered_after_its_step(make_core):
    """The state is computed one step after the block, because it may not include rejected drafts."""
    connector = Connector()
    core = make_core(num_state_slots=8, max_num_seqs=2, connector=connector)
    request = core.add("a", 11, max_tokens=60)
    core.step()
    late = []
    while not request.is_finished:
        core.guess({"a": [7, 7, 7]})
        scheduled, num_orders = core.scheduler.schedule(), len(connector.orders)
        drafts = scheduled.scheduled_spec_decode_tokens.get("a", [])
        core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [*drafts, 7]}))
        for order in connector.orders[num_orders:]:
            late += [order.keys[index] for index in order.states if order.keys[index] in earlier_keys(connector, order)]
    assert late == [request.block_hashes[9]]


def earlier_keys(connector, order):
    """Return the keys of the orders before this one."""
    return {key for each in connector.orders if each.transfer_id < order.transfer_id for key in each.keys}


def test_handover_saves_the_last_block_of_a_hit_with_its_state(offering):
    manager, connector, transfers = offering
    manager.free(compute(manager, "a", 14))
    pair = KVTransferParams(transfer_id="t", is_prefill=True)
    request = Request("b", list(range(14)), SamplingParams(), kv_transfer_params=pair)
    manager.add_tables(request)
    computed = manager.get_computed_blocks(request)
    assert transfers.hand_over_hit(request, computed) == computed
    (order,) = connector.orders
    assert order.keys == [computed.blocks[-1].hash]
    assert order.states == {0: manager.states.id_of(computed.blocks[-1])}
    transfers.hand_over_hit(request, computed)
    assert len(connector.orders) == 1


def test_loaded_state_after_blocks_that_are_not_cached_is_not_copied():
    """Blocks of generated tokens are not cached here, so no lookup would find the state."""
    states = KVGroupSpec(RecurrentStates(), 4)
    manager = KVCacheManager(32, SIZE, bounded_groups=[states], cache_decoded_blocks=False)
    request = Request("a", list(range(6)), SamplingParams())
    request.sequence.token_ids += list(range(20, 30))
    manager.add_tables(request)
    manager.allocate_slots(request, 12, is_loaded=True)
    request.num_computed_tokens = 12
    manager.note_loaded(request)
    manager.commit(request)
    manager.checkpoints.plan(request, 16)
    assert not manager.take_copies()
    assert request.sequence.saves.pending == {}
