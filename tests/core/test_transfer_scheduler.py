"""Open KV transfers by id, request and deadline; which are given up, and what the store is notified of."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import SchedulerConfig
from octavo.core.event_emitter import EventEmitter
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import NO_COMPUTED_BLOCKS, ComputedBlocks
from octavo.core.kv_connector import NullConnector
from octavo.core.transfer_scheduler import KVTransferScheduler
from octavo.data import events
from octavo.data.kv_groups import KVGroupSpec, SlidingWindow
from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.scheduler_output import CachedRequestData, SchedulerOutput, TransferDirection
from octavo.sampling_params import SamplingParams

CONFIG = SchedulerConfig(kv_transfer_timeout_s=5.0, kv_lookup_timeout_s=0.5, min_tokens_to_cache=4).resolved()


class Transfers:
    """Transfers between a store and 16 blocks of 4 tokens, with a timeout of 5 s. `log` has their events."""

    def __init__(self, num_blocks=16):
        self.log, self.store = events.EventLog(), Store(wants=True)
        self.emitter = EventEmitter(self.log)
        self.manager = KVCacheManager(num_blocks, 4)
        self.transfers = KVTransferScheduler(self.store, self.manager, CONFIG, self.emitter)

    def start(self, name, now=0.0, params=None):
        """Begin a load of 8 tokens into 2 blocks; return the request and the order."""
        self.emitter.now = now
        request = Request(name, list(range(12)), SamplingParams(), kv_transfer_params=params)
        assert self.find(request) == 8
        self.manager.allocate_slots(request, 8)
        self.transfers.start_load(request, NO_COMPUTED_BLOCKS, 8)
        [order] = self.transfers.take_orders()
        return request, order

    def find(self, request, computed=NO_COMPUTED_BLOCKS, *, may_wait=True):
        return self.transfers.num_external_tokens(request, computed, may_wait=may_wait)

    def commit(self, name, num_tokens, num_computed=None, params=None):
        """Return a request with computed and registered tokens. num_computed: default all but the last one."""
        request = Request(name, [ord(name[0])] * num_tokens, SamplingParams(), kv_transfer_params=params)
        self.manager.add_tables(request)
        self.manager.allocate_slots(request, num_tokens)
        request.num_computed_tokens = num_tokens - 1 if num_computed is None else num_computed
        self.manager.commit(request)
        return request

    def extend(self, request, num_tokens):
        """Extend a request to `num_tokens` tokens, all but the last one computed and registered."""
        num_new = num_tokens - request.num_tokens
        request.sequence.token_ids += [7] * num_new
        assert self.manager.allocate_slots(request, num_tokens - request.num_computed_tokens) is not None
        request.num_computed_tokens = num_tokens - 1
        self.manager.commit(request)

    def told(self):
        ended = self.log.of_type(events.KVLoadEnded)
        return [(event.request_id, event.transfer_id, event.outcome) for event in ended]


def step_of(num_tokens):
    return SchedulerOutput(1, [], CachedRequestData.make_empty(), {"x": num_tokens}, num_tokens)


@pytest.fixture
def made():
    return Transfers()


# --- look up ----------------------------------------------------------------------------------------------------------


def test_null_connector_counts_as_no_store(made):
    assert made.transfers.has_store is True
    without = KVTransferScheduler(NullConnector(), made.manager, CONFIG, made.emitter)
    assert without.has_store is False
    request = Request("a", list(range(12)), SamplingParams())
    assert without.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 0


@pytest.mark.parametrize(
    ("num_tokens", "offered", "expected"),
    [(13, 8, 8), (13, 99, 12), (13, 11, 8), (12, 99, 12), (13, 3, 0), (13, 0, 0), (5, 99, 4), (4, 99, 0), (3, 99, 0)],
)
def test_load_has_whole_blocks_and_saves_at_least_min_tokens_to_cache(made, num_tokens, offered, expected):
    made.store.num_tokens = offered
    assert made.find(Request("a", list(range(num_tokens)), SamplingParams())) == expected


def test_store_hit_below_min_tokens_to_cache_is_not_loaded(made):
    transfers = KVTransferScheduler(
        made.store, made.manager, SchedulerConfig(min_tokens_to_cache=8).resolved(), made.emitter
    )
    for num_tokens, expected in ((4, 0), (8, 8)):
        made.store.num_tokens = num_tokens
        request = Request(f"a{num_tokens}", list(range(13)), SamplingParams())
        assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == expected


def test_tokens_in_device_cache_are_not_loaded(made):
    made.store.num_tokens = 12
    first = made.commit("a", 14)
    request = Request("b", first.sequence.token_ids[:13], SamplingParams())
    found = made.manager.get_computed_blocks(request)
    assert (found.num_tokens, made.find(request, found)) == (12, 0)
    both, found = found.blocks[:2], ComputedBlocks(found.blocks[:1], 4)
    assert made.find(request, found) == 8
    assert made.store.told[-1] == ("asked", "b", 4)
    assert request.block_hashes == first.block_hashes
    assert made.find(request, ComputedBlocks(found.blocks[:1], 6, source=found.blocks[0])) == 0  # it is copied
    request = Request("c", first.sequence.token_ids[:12], SamplingParams())
    assert made.find(request, ComputedBlocks(both, 8)) == 0  # one of the four tokens is computed anyway


def test_prompt_shorter_than_block_is_not_looked_up(made):
    transfers = KVTransferScheduler(
        made.store, made.manager, SchedulerConfig(min_tokens_to_cache=0).resolved(), made.emitter
    )
    request = Request("a", [1, 2, 3], SamplingParams())
    assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 0
    assert made.store.told == []


def test_block_is_loaded_even_if_it_saves_one_token(made):
    transfers = KVTransferScheduler(
        made.store, KVCacheManager(16, 2), SchedulerConfig(min_tokens_to_cache=0).resolved(), made.emitter
    )
    request = Request("a", [1, 2], SamplingParams())
    assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 2


def test_scored_request_or_failed_load_is_not_looked_up(made):
    scored = Request("a", list(range(12)), SamplingParams(prompt_logprobs=1))
    assert made.find(scored) == 0
    request, order = made.start("b")
    made.transfers.end(EndedTransfer(order.transfer_id, 0))
    made.store.told.clear()
    assert made.find(request) == 0
    assert made.store.told == []
    assert made.transfers.num_records == 1
    made.transfers.request_finished(request)
    assert made.transfers.num_records == 0
    assert made.find(request) == 8


def test_pending_lookup_is_retried_until_kv_lookup_timeout(made):
    request = Request("a", list(range(12)), SamplingParams())
    made.store.num_tokens = None
    assert made.find(request) is None
    assert (made.transfers.num_pending, made.transfers.num_records) == (1, 1)
    assert made.transfers.is_looking_up(request)
    made.emitter.now = 0.4
    assert made.transfers.is_looking_up(request)
    assert made.find(request) is None
    made.store.num_tokens = 8
    assert not made.transfers.is_looking_up(request)
    made.store.num_tokens = None
    made.emitter.now = 0.5
    assert not made.transfers.is_looking_up(request)
    assert made.find(request) == 0
    assert made.transfers.num_pending == 0
    assert made.store.told[-1] == ("given up", "a")
    made.store.num_tokens = 8
    assert made.find(request) == 0  # it does not ask again
    assert (made.transfers.num_pending, made.transfers.num_records) == (0, 1)


@pytest.mark.parametrize("computed", [ComputedBlocks([], 3, [0], is_saved=True), ComputedBlocks([], 8, [0, 1])])
def test_unneeded_pending_lookup_is_dropped(made, computed):
    """The tokens are found elsewhere by now, or too few remain."""
    request = Request("a", list(range(12)), SamplingParams())
    made.store.num_tokens = None
    assert made.find(request) is None
    assert made.find(request, computed) == 0
    assert (made.transfers.num_pending, made.transfers.num_records) == (0, 0)


def test_pending_lookup_is_awaited_only_if_request_may_wait(made):
    first, second = (Request(name, list(range(12)), SamplingParams()) for name in "ab")
    made.store.num_tokens = None
    assert made.find(first, may_wait=False) == 0
    assert made.find(second) is None
    made.store.num_tokens = 8
    assert made.find(second) == 8
    assert made.transfers.num_pending == 0
    assert not made.transfers.is_looking_up(second)


@pytest.mark.parametrize(("num_tokens", "is_told"), [(15, False), (16, True), (100, True)])
def test_computing_cost_is_learned_from_prompt_steps(made, num_tokens, is_told):
    made.transfers.learn_step(step_of(num_tokens), 0.01 * num_tokens)
    request, order = made.start("a", now=1.0)
    made.emitter.now = 3.0
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    assert made.find(request) == (0 if is_told else 8)


def test_load_slower_than_computing_is_not_repeated_immediately(made):
    made.transfers.learn_step(step_of(100), 1.0)
    _, order = made.start("a", now=1.0)
    made.emitter.now = 1.07
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    request, order = made.start("b", now=2.0)  # 10 ms a token: eight tokens in 70 ms
    made.emitter.now = 3.0
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    assert made.find(request) == 0
    assert [made.find(Request("c", list(range(12)), SamplingParams())) for _ in range(31)] == [*[0] * 30, 8]


# --- load -------------------------------------------------------------------------------------------------------------


def test_load_pins_blocks_and_notifies_store_and_event_log(made):
    made.start("before")
    first = made.commit("f", 6)
    request = Request("a", [*first.sequence.token_ids[:4], *range(9)], SamplingParams())
    found = made.manager.get_computed_blocks(request)
    made.store.num_tokens = 12
    assert made.find(request, found) == 8
    block_ids = made.manager.allocate_slots(request, 8, found)
    made.transfers.start_load(request, found, 8)
    [order] = made.transfers.take_orders()
    assert (order.direction, order.request_id) == (TransferDirection.LOAD, "a")
    assert (order.keys, order.block_ids) == (request.block_hashes[1:3], [block_ids[1:3]])
    assert made.store.told[-1] == ("allocated", "a", block_ids, 8)
    assert made.manager.pinned_ids(0)[-2:] == block_ids[1:3]
    [_, started] = made.log.of_type(events.KVLoadStarted)
    assert (started.request_id, started.transfer_id, started.num_tokens) == ("a", order.transfer_id, 8)
    load = made.transfers.end(EndedTransfer(order.transfer_id, 2))
    assert [made.transfers.num_computed_tokens(load, count) for count in (0, 1, 2)] == [4, 8, 12]
    assert made.store.told[-1] == ("ended", order.transfer_id, 2)


def test_complete_load_still_computes_one_token(made):
    made.store.num_tokens = 12
    request = Request("a", list(range(12)), SamplingParams())
    assert made.find(request) == 12
    assert len(request.block_hashes) == 3
    made.manager.allocate_slots(request, 12)
    made.transfers.start_load(request, NO_COMPUTED_BLOCKS, 12)
    [order] = made.transfers.take_orders()
    load = made.transfers.end(EndedTransfer(order.transfer_id, 3))
    assert made.transfers.num_computed_tokens(load, 3) == 11


def test_partial_load_is_used_and_not_retried(made):
    request, order = made.start("a")
    load = made.transfers.end(EndedTransfer(order.transfer_id, 1))
    assert made.transfers.num_computed_tokens(load, 1) == 4
    assert made.told() == [("a", order.transfer_id, "failed")]
    assert made.find(request) == 0


# --- save -------------------------------------------------------------------------------------------------------------


def test_committed_blocks_are_offered_once_and_saved_if_wanted(made):
    request = made.commit("a", 10)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    assert made.store.told[-2:] == [("offered", request.block_hashes[:2]), ("ordered", order.transfer_id)]
    assert (order.direction, order.request_id) == (TransferDirection.SAVE, None)
    assert (order.keys, order.block_ids) == (request.block_hashes[:2], [request.sequence.block_table[:2]])
    assert [made.manager.pinned_ids(0)] == order.block_ids
    assert made.transfers.requests() == []
    assert len(made.transfers) == 0
    assert made.transfers.has_work
    made.transfers.offer(request)
    assert made.transfers.take_orders() == []
    assert made.transfers.end(EndedTransfer(order.transfer_id, 2)) is None
    assert (made.manager.num_transfers, made.transfers.has_work) == (0, False)
    [started], [ended] = made.log.of_type(events.KVSaveStarted), made.log.of_type(events.KVSaveEnded)
    assert (started.num_blocks, ended.num_blocks, ended.outcome) == (2, 2, "done")
    made.transfers.request_finished(request)
    assert made.transfers.num_records == 0


def test_output_blocks_are_saved_in_batches_and_at_request_end():
    made = Transfers(num_blocks=256)
    request = made.commit("a", 9)
    made.transfers.offer(request)
    [of_prompt] = made.transfers.take_orders()
    assert of_prompt.keys == request.block_hashes[:2]
    saved = {}
    for num_blocks in range(3, 22):
        made.extend(request, 4 * num_blocks + 1)
        made.transfers.offer(request)
        for order in made.transfers.take_orders():
            saved[num_blocks] = order
    assert {at: order.keys for at, order in saved.items()} == {
        10: request.block_hashes[2:10],
        18: request.block_hashes[10:18],
    }
    assert saved[18].block_ids == [request.sequence.block_table[10:18]]
    made.transfers.request_finished(request)
    [last] = made.transfers.take_orders()
    assert last.keys == request.block_hashes[18:21]
    assert last.block_ids == [request.sequence.block_table[18:21]]
    made.manager.free(request)
    pinned = set(made.manager.pinned_ids(0))
    assert pinned.issuperset(last.block_ids[0])
    assert made.transfers.num_records == 0


def test_blocks_after_short_prompt_are_saved_at_request_end():
    made = Transfers(num_blocks=256)
    request = made.commit("a", 3)
    made.extend(request, 13)
    made.transfers.offer(request)
    assert (made.transfers.take_orders(), made.transfers.num_records) == ([], 0)
    made.transfers.request_finished(request)
    assert [order.keys for order in made.transfers.take_orders()] == [request.block_hashes[:3]]


def test_prompt_blocks_are_saved_without_batching(made):
    request = made.commit("a", 8, num_computed=4)
    made.transfers.offer(request)
    made.extend(request, 9)
    made.transfers.offer(request)
    assert [order.keys for order in made.transfers.take_orders()] == [[key] for key in request.block_hashes]


def test_preempted_request_is_saved_after_its_blocks_are_allocated_again():
    made = Transfers(num_blocks=256)
    request = made.commit("a", 5)
    made.transfers.offer(request)
    made.extend(request, 21)
    made.transfers.take_orders()
    made.manager.release(request)
    made.transfers.offer(request)
    assert made.transfers.take_orders() == []
    made.manager.allocate_slots(request, 21)
    made.manager.commit(request)
    made.transfers.request_finished(request)
    assert [order.keys for order in made.transfers.take_orders()] == [request.block_hashes[1:5]]


def test_block_with_save_in_flight_is_not_saved_twice(made):
    first, second = made.commit("a", 5), made.commit("abc", 5)  # equal tokens, so their blocks have equal keys
    made.transfers.offer(first)
    [order] = made.transfers.take_orders()
    made.transfers.offer(second)
    assert made.transfers.take_orders() == []
    made.transfers.end(EndedTransfer(order.transfer_id, 1))
    third = made.commit("ab", 5)
    made.transfers.offer(third)  # the store wants them again, because it lost them
    [again] = made.transfers.take_orders()
    assert again.keys == order.keys


def test_uncomputed_blocks_are_not_offered(made):
    request = made.commit("a", 14, num_computed=9)
    made.transfers.offer(request)
    assert made.store.told[-2] == ("offered", request.block_hashes[:2])
    assert len(request.block_hashes) == 3


def test_null_connector_keeps_no_records(made):
    without = KVTransferScheduler(NullConnector(), made.manager, CONFIG, made.emitter)
    without.offer(made.commit("a", 10))
    assert (without.num_records, without.take_orders()) == (0, [])


@pytest.mark.parametrize(("num_blocks", "num_saved"), [(56, 7), (15, 1), (4, 1)])
def test_save_pins_at_most_one_eighth_of_cache(made, num_blocks, num_saved):
    manager = KVCacheManager(num_blocks, 4)
    transfers = KVTransferScheduler(made.store, manager, CONFIG, made.emitter)
    num_tokens = min(4 * num_blocks, 40)
    request = Request("a", list(range(num_tokens)), SamplingParams())
    manager.allocate_slots(request, num_tokens)
    request.num_computed_tokens = num_tokens - 1
    manager.commit(request)
    transfers.offer(request)
    [order] = transfers.take_orders()
    assert order.keys == request.block_hashes[:num_saved]


def test_unwanted_or_too_few_blocks_are_not_saved(made):
    made.store.wants = False
    made.transfers.offer(made.commit("a", 10))
    made.store.wants = True
    made.transfers.offer(made.commit("b", 4))
    short = KVTransferScheduler(
        made.store, made.manager, SchedulerConfig(min_tokens_to_cache=9).resolved(), made.emitter
    )
    request = made.commit("c", 10)
    short.offer(request)
    assert short.num_records == 0
    request.sequence.token_ids += [1, 2, 3]
    made.manager.allocate_slots(request, 4)
    request.num_computed_tokens = 12
    made.manager.commit(request)
    short.offer(request)
    [order] = short.take_orders()  # starting with the first block
    assert order.keys == request.block_hashes[:2]
    assert made.transfers.take_orders() == []


def test_concurrent_saves_share_limit_of_pinned_blocks(made):
    first, second = made.commit("a", 5), made.commit("b", 10)
    made.transfers.offer(first)
    made.transfers.offer(second)
    orders = made.transfers.take_orders()
    assert [len(order.keys) for order in orders] == [1, 1]  # two of 16 blocks
    assert orders[1].keys == second.block_hashes[:1]
    num_told = len(made.store.told)
    made.transfers.offer(second)
    made.extend(second, 14)
    made.transfers.offer(second)
    assert made.transfers.take_orders() == []
    assert len(made.store.told) == num_told, "as long as there is no room it is not asked"
    made.transfers.end(EndedTransfer(orders[0].transfer_id, 0))
    made.transfers.offer(second)
    [order] = made.transfers.take_orders()
    assert order.keys == second.block_hashes[1:2]


def test_saved_blocks_are_not_offered_again_with_delayed_ones(made):
    request = made.commit("a", 14)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    assert order.keys == request.block_hashes[:2]
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    made.transfers.offer(request)  # the store wants all of them
    [order] = made.transfers.take_orders()
    assert order.keys == request.block_hashes[2:3]


def dropped(made):
    return [(event.request_id, event.num_blocks) for event in made.log.of_type(events.KVSavesDropped)]


@pytest.mark.parametrize(("num_tokens", "num_dropped"), [(14, 1), (18, 2)])
def test_blocks_unsaved_at_request_end_are_counted_as_dropped(made, num_tokens, num_dropped):
    request = made.commit("a", num_tokens)
    made.transfers.offer(request)  # two of 16 blocks may be pinned
    assert dropped(made) == []
    made.transfers.request_finished(request)
    assert dropped(made) == [("a", num_dropped)]
    assert made.transfers.num_records == 0


def test_blocks_without_save_capacity_are_counted_as_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    request = made.commit("b", 10)
    made.transfers.request_finished(request)
    assert dropped(made) == [("b", 2)]


def test_uncomputed_blocks_are_not_counted_as_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    request = made.commit("b", 10)
    request.block_hashes.append(b"of a prompt's block that was not computed")
    made.transfers.request_finished(request)
    assert dropped(made) == [("b", 2)]


def test_blocks_in_save_of_another_request_are_not_counted_as_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    same = made.commit("a again", 9)
    made.transfers.request_finished(same)
    assert dropped(made) == []
    in_part = made.commit("b", 9)
    made.transfers._saving_in_part.start(in_part.block_hashes)
    made.transfers.request_finished(in_part)
    assert dropped(made) == []


def test_previously_offered_blocks_are_not_counted_as_dropped(made):
    request = made.commit("a", 14)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    made.transfers.request_finished(request)  # the store wants all of them, because it forgot them
    assert dropped(made) == []


def test_dropped_save_of_exactly_min_tokens_to_cache_is_counted(made):
    made.transfers.offer(made.commit("a", 14))
    made.transfers.request_finished(made.commit("b", 5))  # a block of four tokens, the fewest
    assert dropped(made) == [("b", 1)]


def test_unwanted_or_too_few_blocks_are_not_counted_as_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    made.transfers.request_finished(made.commit("c", 3))
    made.store.wants = False
    made.transfers.request_finished(made.commit("b", 10))
    short = KVTransferScheduler(
        made.store, made.manager, SchedulerConfig(min_tokens_to_cache=9).resolved(), made.emitter
    )
    made.store.wants = True
    short.request_finished(made.commit("d", 8))
    assert dropped(made) == []


def test_blocks_saved_at_request_end_are_not_counted_as_dropped(made):
    made.transfers.request_finished(made.commit("a", 10))
    assert dropped(made) == []


def test_handover_to_another_engine_drops_no_blocks(made):
    request = made.commit("a", 18, params=KVTransferParams("t", is_prefill=True))
    made.transfers.request_finished(request)
    assert dropped(made) == []


def test_expired_save_holds_blocks_until_worker_gets_cancel(made):
    request = made.commit("a", 5)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    made.manager.free(request)
    assert made.transfers.expired(4.9) == []
    assert made.transfers.take_cancels() == []
    assert made.transfers.expired(5.0) == []
    assert made.transfers.take_cancels() == [order.transfer_id]
    assert made.store.told[-1] == ("ended", order.transfer_id, None)
    assert made.manager.num_transfers == 1
    made.transfers.end_cancels([order.transfer_id])
    assert made.manager.num_transfers == 0
    assert made.transfers.end(EndedTransfer(order.transfer_id, 1)) is None
    assert len(made.log.of_type(events.StaleResultDropped)) == 1
    [ended] = made.log.of_type(events.KVSaveEnded)
    assert (ended.num_blocks, ended.outcome) == (0, "expired")


# --- it ends ----------------------------------------------------------------------------------------------------------


def test_transfer_ends_once_and_its_id_is_not_reused(made):
    request, order = made.start("a")
    assert (len(made.transfers), made.transfers.num_records, made.transfers.requests()) == (1, 1, [request])
    load = made.transfers.end(EndedTransfer(order.transfer_id, 2))
    assert (load.request, made.transfers.num_computed_tokens(load, 2)) == (request, 8)
    assert (len(made.transfers), made.transfers.num_records, made.transfers.requests()) == (0, 0, [])
    assert made.manager.num_transfers == 0
    assert made.told() == [("a", order.transfer_id, "done")]
    ids = {order.transfer_id, *(made.start(name)[1].transfer_id for name in "bcd")}
    assert len(ids) == 4
    assert made.transfers.end(EndedTransfer(order.transfer_id, 2)) is None
    assert len(made.transfers) == 3
    [dropped] = made.log.of_type(events.StaleResultDropped)
    assert f"transfer {order.transfer_id} " in dropped.detail


def test_failed_transfer_releases_its_blocks(made):
    request, order = made.start("a")
    assert made.transfers.end(EndedTransfer(order.transfer_id, 0)).request is request
    assert made.told() == [("a", order.transfer_id, "failed")]
    assert made.manager.num_transfers == 0
    assert not made.transfers.has_work


def test_expired_returns_loads_past_their_deadline(made):
    first, _ = made.start("a", now=1.0)
    second, _ = made.start("b", now=2.0)
    made.start("c", now=3.0)
    assert made.transfers.expired(5.9) == []
    assert made.transfers.expired(6.0) == [first]
    assert made.transfers.expired(7.9) == [first, second]


def test_expired_load_counts_as_slow_load_for_next_request(made):
    """The timeout is a lower bound of the time that the load takes."""
    made.transfers.learn_step(step_of(100), 1.0)
    request, _ = made.start("a", now=1.0)
    assert made.transfers.expired(6.0) == [request]
    made.transfers.cancel(request, "expired")
    assert made.transfers._cost._loads.seconds(8) == 5.0
    assert made.find(Request("b", list(range(12)), SamplingParams())) == 0


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(0, 0), (1, 4), (2, 8)])
def test_load_event_reports_loaded_tokens_and_saved_computing_time(made, num_blocks, num_tokens):
    made.transfers.learn_step(step_of(100), 50.0)
    _, order = made.start("a", now=1.0)
    made.emitter.now = 3.0
    made.transfers.end(EndedTransfer(order.transfer_id, num_blocks))
    [event] = made.log.of_type(events.KVLoadEnded)
    assert (event.num_tokens, event.seconds, event.computing_s) == (num_tokens, 2.0, 0.5 * num_tokens)


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_load_event_reports_source_tiers_and_resumption(made, num_preemptions):
    request, order = made.start("a")
    request.num_preemptions = num_preemptions
    moves = (TierMove("memory", 1, 100, 0.25), TierMove("disk", 1, 100, 0.5))
    made.transfers.end(EndedTransfer(order.transfer_id, 2, moves))
    [event] = made.log.of_type(events.KVLoadEnded)
    assert (event.moves, event.resumed) == (moves, num_preemptions == 1)


def test_save_event_reports_target_tiers(made):
    made.transfers.offer(made.commit("a", 5))
    [order] = made.transfers.take_orders()
    move = TierMove("disk", 1, 100, 0.5)
    made.transfers.end(EndedTransfer(order.transfer_id, 1, (move,)))
    made.transfers.offer(made.commit("b", 5))
    made.transfers.expired(5.0)
    assert [event.moves for event in made.log.of_type(events.KVSaveEnded)] == [(move,), ()]


def test_store_evictions_are_reported_even_for_unknown_transfer(made):
    _, order = made.start("a")
    made.transfers.end(EndedTransfer(order.transfer_id, 2, evicted=(("memory", 3), ("disk", 1))))
    made.transfers.end(EndedTransfer(99, 2, (TierMove("disk", 2, 100, 0.5),), (("disk", 4),)))
    told = [(event.tier, event.num_blocks) for event in made.log.of_type(events.StoreBlocksEvicted)]
    assert told == [("memory", 3), ("disk", 1), ("disk", 4)]
    assert len(made.log.of_type(events.KVLoadEnded)) == 1


@pytest.mark.parametrize(
    ("store", "num_host_blocks", "learns"), [(Store(), 0, True), (None, 1, True), (None, 0, False)]
)
def test_step_cost_is_learned_only_with_store_or_host_memory(made, store, num_host_blocks, learns):
    manager = KVCacheManager(16, 4, num_host_blocks=num_host_blocks)
    assert KVTransferScheduler(store or NullConnector(), manager, CONFIG, made.emitter).learns_steps is learns


def test_cancelled_load_reports_zero_tokens(made):
    request, _ = made.start("a")
    made.transfers.cancel(request, "cancelled")
    assert [event.num_tokens for event in made.log.of_type(events.KVLoadEnded)] == [0]


def test_cancelled_load_holds_blocks_until_worker_gets_cancel(made):
    request, order = made.start("a")
    other, _ = made.start("b")
    made.transfers.cancel(request, "expired")
    assert made.told() == [("a", order.transfer_id, "expired")]
    assert made.transfers.requests() == [other]
    assert made.find(request) == 0
    assert made.transfers.take_cancels() == [order.transfer_id]
    assert made.transfers.take_cancels() == []
    assert made.manager.num_transfers == 2
    made.transfers.end_cancels([order.transfer_id])
    assert made.manager.num_transfers == 1


def test_expired_save_that_was_never_sent_needs_no_cancel(made):
    request = made.commit("a", 5)
    made.transfers.offer(request)
    made.transfers.expired(5.0)
    assert (made.transfers.take_orders(), made.transfers.take_cancels()) == ([], [])
    assert made.manager.num_transfers == 0


def test_failed_step_fails_its_transfers_and_resends_cancels(made):
    first, order = made.start("a")
    _, stale = made.start("b")
    made.transfers.end(EndedTransfer(stale.transfer_id, 2))
    made.start("b")  # another transfer with the same id
    saved = made.commit("s", 5)
    made.transfers.offer(saved)
    [save] = made.transfers.take_orders()
    assert made.transfers.fail_step([order, stale, save], [77]) == [first]
    assert made.transfers.take_cancels() == [77, order.transfer_id, save.transfer_id]
    assert made.told()[-1] == ("a", order.transfer_id, "failed")
    assert made.log.of_type(events.KVSaveEnded)[-1].outcome == "failed"
    assert [request.request_id for request in made.transfers.requests()] == ["b"]


def test_store_gets_copy_of_block_ids_of_finished_request(made):
    request, _ = made.start("a")
    made.transfers.request_finished(request)
    told = made.store.told[-1]
    assert told == ("finished", "a", [0, 1])
    request.sequence.block_table.clear()
    assert told[2] == [0, 1]


# --- prefill and decode on two engines --------------------------------------------------------------------------------

EXPECTS, HANDS_OVER = KVTransferParams("t"), KVTransferParams("t", is_prefill=True)


def expecting(name="a", params=EXPECTS):
    return Request(name, list(range(12)), SamplingParams(), kv_transfer_params=params)


def test_kv_from_prefill_engine_is_loaded_regardless_of_load_cost(made):
    made.transfers._cost.learn_step(100, 0.001)
    for seconds in (100.0, 100.0):
        made.transfers._cost.learn_load(8, seconds)
    assert made.find(Request("b", list(range(12)), SamplingParams())) == 0
    assert made.find(expecting("c", HANDS_OVER)) == 0
    assert made.find(expecting()) == 8


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("params", "is_learned"), [(None, True), (EXPECTS, False), (HANDS_OVER, True)])
def test_load_from_prefill_engine_does_not_change_load_cost(made, params, ends, is_learned):
    learned = []
    made.transfers._cost.learn_load = lambda *figures: learned.append(figures)
    request, order = made.start("a", params=params)
    made.emitter.now = 9.0
    if ends:
        made.transfers.end(EndedTransfer(order.transfer_id, 2))
    else:
        assert made.transfers.expired(9.0) == [request]
    assert learned == ([(8, 9.0)] if is_learned else [])


def test_lookup_of_kv_from_prefill_engine_has_longer_timeout(made):
    made.store.num_tokens = None
    request, other = expecting(), Request("b", list(range(12)), SamplingParams())
    assert made.find(request) is None
    assert made.find(other) is None
    made.emitter.now = 4.9  # other loads are given up after 0.5 s
    assert made.transfers.is_looking_up(request)
    assert not made.transfers.is_looking_up(other)
    assert (made.find(request), made.find(other)) == (None, 0)
    made.emitter.now = 5.0
    assert not made.transfers.is_looking_up(request)
    assert made.find(request) == 0


def test_handover_saves_all_blocks_despite_pin_limit(made):
    request = made.commit("a", 41, params=HANDS_OVER)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    assert order.keys == request.block_hashes[:10]  # of 16 blocks
    made.transfers.offer(request)
    assert made.transfers.take_orders() == []
    made.transfers.offer(made.commit("b", 10))
    assert made.transfers.take_orders() == []  # for other requests the limit on pinned blocks is unchanged
    made.transfers.end(EndedTransfer(order.transfer_id, 10))
    assert made.manager.num_transfers == 0


def test_store_is_notified_of_added_requests_and_transfer_orders(made):
    request = expecting()
    made.transfers.request_added(request)
    assert made.store.told == [("added", "a")]
    _, order = made.start("b")
    assert ("ordered", order.transfer_id) in made.store.told


def test_handover_without_windows_uses_hit_without_store_lookup(made):
    first = made.commit("a", 12)
    request = Request("b", first.sequence.token_ids, SamplingParams(), kv_transfer_params=HANDS_OVER)
    found = made.manager.get_computed_blocks(request)
    made.store.told.clear()
    assert made.transfers.hand_over_hit(request, found) is found
    assert made.store.told == []


def test_handover_with_windows_queries_store_only_for_hit_blocks(made):
    made.manager = KVCacheManager(16, 4, bounded_groups=[KVGroupSpec(SlidingWindow(6), 8)], max_step_tokens=16)
    made.transfers = KVTransferScheduler(made.store, made.manager, CONFIG, made.emitter)
    first = made.commit("a", 12)
    tokens = [*first.sequence.token_ids[:8], *range(8)]
    request = Request("b", tokens, SamplingParams(), kv_transfer_params=HANDS_OVER)
    found = made.manager.get_computed_blocks(request)
    assert len(request.block_hashes) > found.num_blocks == 2
    made.store.told.clear()
    assert made.transfers.hand_over_hit(request, found) is found
    assert made.store.told[0] == ("offered", request.block_hashes[:2])
