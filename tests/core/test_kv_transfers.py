"""Open KV transfers by id, request and deadline; which are given up, and what the store is notified of."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.config import SchedulerConfig
from octavo.core.event_emitter import EventEmitter
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import NO_COMPUTED_BLOCKS, ComputedBlocks
from octavo.core.kv_connector import NullConnector
from octavo.core.kv_transfers import KVTransfers
from octavo.data import events
from octavo.data.kv_groups import KVGroupSpec, SlidingWindow
from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.scheduler_output import CachedRequestData, SchedulerOutput, TransferDirection
from octavo.sampling_params import SamplingParams

CONFIG = SchedulerConfig(kv_transfer_timeout_s=5.0, kv_lookup_timeout_s=0.5, min_tokens_to_cache=4)


class Transfers:
    """Transfers between a store and 16 blocks of 4 tokens, with a timeout of 5 s. `log` has their events."""

    def __init__(self, num_blocks=16):
        self.log, self.store = events.EventLog(), Store(wants=True)
        self.emitter = EventEmitter(self.log)
        self.manager = KVCacheManager(num_blocks, 4)
        self.transfers = KVTransfers(self.store, self.manager, CONFIG, self.emitter)

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


def test_whether_there_is_a_store(made):
    assert made.transfers.has_store is True
    without = KVTransfers(NullConnector(), made.manager, CONFIG, made.emitter)
    assert without.has_store is False
    request = Request("a", list(range(12)), SamplingParams())
    assert without.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 0


@pytest.mark.parametrize(
    ("num_tokens", "offered", "expected"),
    [(13, 8, 8), (13, 99, 12), (13, 11, 8), (12, 99, 12), (13, 3, 0), (13, 0, 0), (5, 99, 4), (4, 99, 0), (3, 99, 0)],
)
def test_whole_blocks_are_fetched_and_none_where_it_would_spare_less_than_the_fewest_tokens(
    made, num_tokens, offered, expected
):
    made.store.num_tokens = offered
    assert made.find(Request("a", list(range(num_tokens)), SamplingParams())) == expected


def test_what_a_store_has_less_of_than_the_fewest_tokens_is_not_fetched(made):
    transfers = KVTransfers(made.store, made.manager, SchedulerConfig(min_tokens_to_cache=8), made.emitter)
    for num_tokens, expected in ((4, 0), (8, 8)):
        made.store.num_tokens = num_tokens
        request = Request(f"a{num_tokens}", list(range(13)), SamplingParams())
        assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == expected


def test_what_is_computed_here_is_not_fetched(made):
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


def test_what_is_shorter_than_a_block_is_not_asked_for(made):
    transfers = KVTransfers(made.store, made.manager, SchedulerConfig(min_tokens_to_cache=0), made.emitter)
    request = Request("a", [1, 2, 3], SamplingParams())
    assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 0
    assert made.store.told == []


def test_a_block_is_fetched_though_it_spares_a_single_token(made):
    transfers = KVTransfers(made.store, KVCacheManager(16, 2), SchedulerConfig(min_tokens_to_cache=0), made.emitter)
    request = Request("a", [1, 2], SamplingParams())
    assert transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS, may_wait=True) == 2


def test_who_scores_its_prompt_or_gave_up_is_not_asked_for(made):
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


def test_a_store_that_does_not_know_yet_is_asked_again_until_it_has_taken_too_long(made):
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
def test_a_question_that_became_pointless_waits_for_no_answer(made, computed):
    """The tokens are found elsewhere by now, or too few remain."""
    request = Request("a", list(range(12)), SamplingParams())
    made.store.num_tokens = None
    assert made.find(request) is None
    assert made.find(request, computed) == 0
    assert (made.transfers.num_pending, made.transfers.num_records) == (0, 0)


def test_who_cannot_wait_computes_itself_and_who_hears_fetches(made):
    first, second = (Request(name, list(range(12)), SamplingParams()) for name in "ab")
    made.store.num_tokens = None
    assert made.find(first, may_wait=False) == 0
    assert made.find(second) is None
    made.store.num_tokens = 8
    assert made.find(second) == 8
    assert made.transfers.num_pending == 0
    assert not made.transfers.is_looking_up(second)


@pytest.mark.parametrize(("num_tokens", "is_told"), [(15, False), (16, True), (100, True)])
def test_what_computing_takes_is_learned_of_steps_of_prompts(made, num_tokens, is_told):
    made.transfers.learn_step(step_of(num_tokens), 0.01 * num_tokens)
    request, order = made.start("a", now=1.0)
    made.emitter.now = 3.0
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    assert made.find(request) == (0 if is_told else 8)


def test_a_load_that_took_longer_than_computing_is_not_made_again_at_once(made):
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


def test_what_a_load_is_and_who_is_told(made):
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


def test_a_token_is_always_left_to_compute(made):
    made.store.num_tokens = 12
    request = Request("a", list(range(12)), SamplingParams())
    assert made.find(request) == 12
    assert len(request.block_hashes) == 3
    made.manager.allocate_slots(request, 12)
    made.transfers.start_load(request, NO_COMPUTED_BLOCKS, 12)
    [order] = made.transfers.take_orders()
    load = made.transfers.end(EndedTransfer(order.transfer_id, 3))
    assert made.transfers.num_computed_tokens(load, 3) == 11


def test_a_load_that_arrives_in_part_is_of_use_and_asks_no_more(made):
    request, order = made.start("a")
    load = made.transfers.end(EndedTransfer(order.transfer_id, 1))
    assert made.transfers.num_computed_tokens(load, 1) == 4
    assert made.told() == [("a", order.transfer_id, "failed")]
    assert made.find(request) == 0


# --- save -------------------------------------------------------------------------------------------------------------


def test_what_can_be_shared_is_offered_once_and_what_is_wanted_is_saved(made):
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


def test_blocks_of_answers_are_saved_several_together_and_the_last_with_the_end():
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


def test_of_an_answer_without_a_whole_block_of_a_prompt_what_is_there_is_saved_with_its_end():
    made = Transfers(num_blocks=256)
    request = made.commit("a", 3)
    made.extend(request, 13)
    made.transfers.offer(request)
    assert (made.transfers.take_orders(), made.transfers.num_records) == ([], 0)
    made.transfers.request_finished(request)
    assert [order.keys for order in made.transfers.take_orders()] == [request.block_hashes[:3]]


def test_a_prompt_is_saved_at_once_with_the_blocks_behind_it(made):
    request = made.commit("a", 8, num_computed=4)
    made.transfers.offer(request)
    made.extend(request, 9)
    made.transfers.offer(request)
    assert [order.keys for order in made.transfers.take_orders()] == [[key] for key in request.block_hashes]


def test_who_gives_way_is_saved_when_its_blocks_are_there_again():
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


def test_what_is_being_saved_is_not_saved_beside_itself(made):
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


def test_what_is_not_computed_yet_is_not_offered(made):
    request = made.commit("a", 14, num_computed=9)
    made.transfers.offer(request)
    assert made.store.told[-2] == ("offered", request.block_hashes[:2])
    assert len(request.block_hashes) == 3


def test_without_a_store_nothing_is_kept_of_anybody(made):
    without = KVTransfers(NullConnector(), made.manager, CONFIG, made.emitter)
    without.offer(made.commit("a", 10))
    assert (without.num_records, without.take_orders()) == (0, [])


@pytest.mark.parametrize(("num_blocks", "num_saved"), [(56, 7), (15, 1), (4, 1)])
def test_an_eighth_of_a_cache_is_saved_at_once(made, num_blocks, num_saved):
    manager = KVCacheManager(num_blocks, 4)
    transfers = KVTransfers(made.store, manager, CONFIG, made.emitter)
    num_tokens = min(4 * num_blocks, 40)
    request = Request("a", list(range(num_tokens)), SamplingParams())
    manager.allocate_slots(request, num_tokens)
    request.num_computed_tokens = num_tokens - 1
    manager.commit(request)
    transfers.offer(request)
    [order] = transfers.take_orders()
    assert order.keys == request.block_hashes[:num_saved]


def test_what_nobody_wants_or_is_too_short_is_not_saved(made):
    made.store.wants = False
    made.transfers.offer(made.commit("a", 10))
    made.store.wants = True
    made.transfers.offer(made.commit("b", 4))
    short = KVTransfers(made.store, made.manager, SchedulerConfig(min_tokens_to_cache=9), made.emitter)
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


def test_saves_hold_few_blocks_at_once(made):
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


def test_what_was_offered_is_not_offered_again_with_what_found_no_room(made):
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
def test_blocks_that_find_no_room_until_their_request_ends_are_counted(made, num_tokens, num_dropped):
    request = made.commit("a", num_tokens)
    made.transfers.offer(request)  # two of 16 blocks may be pinned
    assert dropped(made) == []
    made.transfers.request_finished(request)
    assert dropped(made) == [("a", num_dropped)]
    assert made.transfers.num_records == 0


def test_blocks_of_a_request_that_finds_all_room_taken_are_counted(made):
    made.transfers.offer(made.commit("a", 14))
    request = made.commit("b", 10)
    made.transfers.request_finished(request)
    assert dropped(made) == [("b", 2)]


def test_blocks_that_were_not_computed_are_not_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    request = made.commit("b", 10)
    request.block_hashes.append(b"of a prompt's block that was not computed")
    made.transfers.request_finished(request)
    assert dropped(made) == [("b", 2)]


def test_blocks_that_are_being_saved_for_another_request_are_not_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    same = made.commit("a again", 9)
    made.transfers.request_finished(same)
    assert dropped(made) == []
    in_part = made.commit("b", 9)
    made.transfers._saving_in_part.update(in_part.block_hashes)
    made.transfers.request_finished(in_part)
    assert dropped(made) == []


def test_blocks_that_were_offered_before_are_not_dropped(made):
    request = made.commit("a", 14)
    made.transfers.offer(request)
    [order] = made.transfers.take_orders()
    made.transfers.end(EndedTransfer(order.transfer_id, 2))
    made.transfers.request_finished(request)  # the store wants all of them, because it forgot them
    assert dropped(made) == []


def test_as_few_blocks_as_may_be_saved_are_counted_when_they_are_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    made.transfers.request_finished(made.commit("b", 5))  # a block of four tokens, the fewest
    assert dropped(made) == [("b", 1)]


def test_blocks_that_a_store_does_not_want_or_that_are_too_few_are_not_dropped(made):
    made.transfers.offer(made.commit("a", 14))
    made.transfers.request_finished(made.commit("c", 3))
    made.store.wants = False
    made.transfers.request_finished(made.commit("b", 10))
    short = KVTransfers(made.store, made.manager, SchedulerConfig(min_tokens_to_cache=9), made.emitter)
    made.store.wants = True
    short.request_finished(made.commit("d", 8))
    assert dropped(made) == []


def test_blocks_that_find_room_at_the_end_of_their_request_are_not_dropped(made):
    made.transfers.request_finished(made.commit("a", 10))
    assert dropped(made) == []


def test_a_prompt_for_another_engine_drops_nothing(made):
    request = made.commit("a", 18, params=KVTransferParams("t", is_prefill=True))
    made.transfers.request_finished(request)
    assert dropped(made) == []


def test_a_save_that_takes_too_long_is_given_up_and_its_blocks_are_held_until_the_worker_was_told(made):
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


def test_a_transfer_ends_once_and_its_id_never_comes_back(made):
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


def test_a_failed_transfer_lets_go_of_its_blocks(made):
    request, order = made.start("a")
    assert made.transfers.end(EndedTransfer(order.transfer_id, 0)).request is request
    assert made.told() == [("a", order.transfer_id, "failed")]
    assert made.manager.num_transfers == 0
    assert not made.transfers.has_work


def test_expired_is_whose_deadline_has_come(made):
    first, _ = made.start("a", now=1.0)
    second, _ = made.start("b", now=2.0)
    made.start("c", now=3.0)
    assert made.transfers.expired(5.9) == []
    assert made.transfers.expired(6.0) == [first]
    assert made.transfers.expired(7.9) == [first, second]


def test_a_load_that_takes_too_long_is_not_tried_by_the_next(made):
    """The timeout is a lower bound of the time that the load takes."""
    made.transfers.learn_step(step_of(100), 1.0)
    request, _ = made.start("a", now=1.0)
    assert made.transfers.expired(6.0) == [request]
    made.transfers.cancel(request, "expired")
    assert made.transfers._cost._loads.seconds(8) == 5.0
    assert made.find(Request("b", list(range(12)), SamplingParams())) == 0


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(0, 0), (1, 4), (2, 8)])
def test_what_came_and_what_it_spared_is_told(made, num_blocks, num_tokens):
    made.transfers.learn_step(step_of(100), 50.0)
    _, order = made.start("a", now=1.0)
    made.emitter.now = 3.0
    made.transfers.end(EndedTransfer(order.transfer_id, num_blocks))
    [event] = made.log.of_type(events.KVLoadEnded)
    assert (event.num_tokens, event.seconds, event.computing_s) == (num_tokens, 2.0, 0.5 * num_tokens)


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_which_tiers_gave_a_load_is_told_with_it(made, num_preemptions):
    request, order = made.start("a")
    request.num_preemptions = num_preemptions
    moves = (TierMove("memory", 1, 100, 0.25), TierMove("disk", 1, 100, 0.5))
    made.transfers.end(EndedTransfer(order.transfer_id, 2, moves))
    [event] = made.log.of_type(events.KVLoadEnded)
    assert (event.moves, event.resumed) == (moves, num_preemptions == 1)


def test_which_tiers_took_a_save_is_told_with_it(made):
    made.transfers.offer(made.commit("a", 5))
    [order] = made.transfers.take_orders()
    move = TierMove("disk", 1, 100, 0.5)
    made.transfers.end(EndedTransfer(order.transfer_id, 1, (move,)))
    made.transfers.offer(made.commit("b", 5))
    made.transfers.expired(5.0)
    assert [event.moves for event in made.log.of_type(events.KVSaveEnded)] == [(move,), ()]


def test_what_made_way_in_stores_is_told_even_by_a_transfer_that_nobody_knows(made):
    _, order = made.start("a")
    made.transfers.end(EndedTransfer(order.transfer_id, 2, evicted=(("memory", 3), ("disk", 1))))
    made.transfers.end(EndedTransfer(99, 2, (TierMove("disk", 2, 100, 0.5),), (("disk", 4),)))
    told = [(event.tier, event.num_blocks) for event in made.log.of_type(events.StoreBlocksEvicted)]
    assert told == [("memory", 3), ("disk", 1), ("disk", 4)]
    assert len(made.log.of_type(events.KVLoadEnded)) == 1


@pytest.mark.parametrize(
    ("store", "num_host_blocks", "learns"), [(Store(), 0, True), (None, 1, True), (None, 0, False)]
)
def test_what_computing_takes_is_of_interest_where_there_is_another_tier(made, store, num_host_blocks, learns):
    manager = KVCacheManager(16, 4, num_host_blocks=num_host_blocks)
    assert KVTransfers(store or NullConnector(), manager, CONFIG, made.emitter).learns_steps is learns


def test_of_a_load_that_was_given_up_nothing_came(made):
    request, _ = made.start("a")
    made.transfers.cancel(request, "cancelled")
    assert [event.num_tokens for event in made.log.of_type(events.KVLoadEnded)] == [0]


def test_a_cancelled_transfer_keeps_its_blocks_until_the_worker_was_told(made):
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


def test_what_the_worker_never_heard_of_is_not_cancelled_there(made):
    request = made.commit("a", 5)
    made.transfers.offer(request)
    made.transfers.expired(5.0)
    assert (made.transfers.take_orders(), made.transfers.take_cancels()) == ([], [])
    assert made.manager.num_transfers == 0


def test_a_failed_step_gives_up_its_own_orders_and_tells_its_cancels_again(made):
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


def test_the_store_is_told_of_an_ending_with_the_blocks_that_were_held(made):
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


def test_what_another_engine_computed_is_fetched_whatever_loads_have_cost(made):
    made.transfers._cost.learn_step(100, 0.001)
    for seconds in (100.0, 100.0):
        made.transfers._cost.learn_load(8, seconds)
    assert made.find(Request("b", list(range(12)), SamplingParams())) == 0
    assert made.find(expecting("c", HANDS_OVER)) == 0
    assert made.find(expecting()) == 8


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("params", "is_learned"), [(None, True), (EXPECTS, False), (HANDS_OVER, True)])
def test_waiting_for_what_is_still_computed_teaches_nothing_of_loads(made, params, ends, is_learned):
    learned = []
    made.transfers._cost.learn_load = lambda *figures: learned.append(figures)
    request, order = made.start("a", params=params)
    made.emitter.now = 9.0
    if ends:
        made.transfers.end(EndedTransfer(order.transfer_id, 2))
    else:
        assert made.transfers.expired(9.0) == [request]
    assert learned == ([(8, 9.0)] if is_learned else [])


def test_what_is_expected_may_take_longer_to_be_found(made):
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


def test_what_is_for_another_engine_is_saved_whole(made):
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


def test_the_store_hears_of_newcomers_and_of_orders(made):
    request = expecting()
    made.transfers.request_added(request)
    assert made.store.told == [("added", "a")]
    _, order = made.start("b")
    assert ("ordered", order.transfer_id) in made.store.told


def test_without_windows_what_was_found_is_handed_over_whatever_a_store_has(made):
    first = made.commit("a", 12)
    request = Request("b", first.sequence.token_ids, SamplingParams(), kv_transfer_params=HANDS_OVER)
    found = made.manager.get_computed_blocks(request)
    made.store.told.clear()
    assert made.transfers.hand_over_hit(request, found) is found
    assert made.store.told == []


def test_with_windows_a_store_is_asked_for_what_was_found_and_no_more(made):
    made.manager = KVCacheManager(16, 4, bounded_groups=[KVGroupSpec(SlidingWindow(6), 8)], max_step_tokens=16)
    made.transfers = KVTransfers(made.store, made.manager, CONFIG, made.emitter)
    first = made.commit("a", 12)
    tokens = [*first.sequence.token_ids[:8], *range(8)]
    request = Request("b", tokens, SamplingParams(), kv_transfer_params=HANDS_OVER)
    found = made.manager.get_computed_blocks(request)
    assert len(request.block_hashes) > found.num_blocks == 2
    made.store.told.clear()
    assert made.transfers.hand_over_hit(request, found) is found
    assert made.store.told[0] == ("offered", request.block_hashes[:2])
