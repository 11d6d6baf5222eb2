"""Transfers under way, by id, by request and by deadline; which of them were given up, and what the store is told."""

from __future__ import annotations

import pytest

from octavo.core.event_emitter import EventEmitter
from octavo.core.kv_cache_manager import NO_COMPUTED_BLOCKS, ComputedBlocks, KVCacheManager
from octavo.core.kv_connector import NullConnector
from octavo.core.kv_transfers import KVTransfers
from octavo.data import events
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


class Store:
    def __init__(self):
        self.num_tokens = 8
        self.told = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.told.append(("asked", request.request_id, num_computed_tokens))
        return self.num_tokens

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.told.append(("allocated", request.request_id, block_ids, num_external_tokens))

    def request_finished(self, request, block_ids):
        self.told.append(("finished", request.request_id, block_ids))


class Transfers:
    """Transfers of a store into 8 blocks of 4 tokens, which may take 5 s; `log` has what is told of them."""

    def __init__(self):
        self.log, self.store = events.EventLog(), Store()
        self.emitter = EventEmitter(self.log)
        self.manager = KVCacheManager(8, 4)
        self.transfers = KVTransfers(self.store, self.manager, 5.0, self.emitter)

    def start(self, name, now=0.0):
        """Begin one of 8 tokens into 2 blocks; return request and order."""
        self.emitter.now = now
        request = Request(name, list(range(12)), SamplingParams())
        block_ids = self.manager.allocate_slots(request, 8)
        return request, self.transfers.start(request, NO_COMPUTED_BLOCKS, 8, block_ids)

    def told(self):
        ended = self.log.of_type(events.KVLoadEnded)
        return [(event.request_id, event.transfer_id, event.outcome) for event in ended]


@pytest.fixture
def made():
    return Transfers()


def test_whether_there_is_a_store(made):
    assert made.transfers.has_store is True
    without = KVTransfers(NullConnector(), made.manager, 5.0, made.emitter)
    assert without.has_store is False
    assert without.num_external_tokens(Request("a", list(range(12)), SamplingParams()), NO_COMPUTED_BLOCKS) == 0


@pytest.mark.parametrize(
    ("offered", "num_computed", "expected"),
    [(8, 0, 8), (99, 0, 11), (99, 4, 7), (0, 4, 0), (3, 11, 0), (3, 12, 0), (-3, 0, 0)],
)
def test_a_token_is_always_left_to_compute(made, offered, num_computed, expected):
    made.store.num_tokens = offered
    request = Request("a", list(range(12)), SamplingParams())
    assert made.transfers.num_external_tokens(request, ComputedBlocks([], num_computed)) == expected
    assert made.store.told == [("asked", "a", num_computed)]


def test_who_scores_its_prompt_or_gave_up_is_not_asked_for(made):
    scored = Request("a", list(range(12)), SamplingParams(prompt_logprobs=1))
    assert made.transfers.num_external_tokens(scored, NO_COMPUTED_BLOCKS) == 0
    request, order = made.start("b")
    made.transfers.end(order.transfer_id, arrived=False)
    made.store.told.clear()
    assert made.transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == 0
    assert made.store.told == []
    assert made.transfers.num_records == 1
    made.transfers.request_finished(request)
    assert made.transfers.num_records == 0
    assert made.transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == 8


def test_what_a_transfer_is_and_who_is_told(made):
    made.start("before")
    request = Request("a", list(range(12)), SamplingParams())
    found = ComputedBlocks([], 4)
    request.sequence.block_table += made.manager.allocate_slots(Request("x", [1], SamplingParams()), 12)
    block_ids = request.sequence.block_table
    order = made.transfers.start(request, found, 6, block_ids)
    assert (order.request_id, order.token_ids, order.num_present) == ("a", list(range(10)), 4)
    assert order.block_ids == block_ids
    assert order.block_ids is not block_ids
    assert made.store.told[-1] == ("allocated", "a", block_ids, 6)
    assert [block.block_id for block in made.manager.pinned_blocks()][-3:] == block_ids
    [_, started] = made.log.of_type(events.KVLoadStarted)
    assert (started.request_id, started.transfer_id, started.num_tokens) == ("a", order.transfer_id, 6)
    assert made.transfers.end(order.transfer_id, arrived=True).num_tokens == 10


def test_a_transfer_ends_once_and_its_id_never_comes_back(made):
    request, order = made.start("a")
    assert (len(made.transfers), made.transfers.num_records, made.transfers.requests()) == (1, 1, [request])
    load = made.transfers.end(order.transfer_id, arrived=True)
    assert (load.request, load.num_tokens) == (request, 8)
    assert (len(made.transfers), made.transfers.num_records, made.transfers.requests()) == (0, 0, [])
    assert made.manager.num_transfers == 0
    assert made.told() == [("a", order.transfer_id, "done")]
    ids = {order.transfer_id, *(made.start(name)[1].transfer_id for name in "bcd")}
    assert len(ids) == 4
    assert made.transfers.end(order.transfer_id, arrived=True) is None
    assert len(made.transfers) == 3
    [dropped] = made.log.of_type(events.StaleResultDropped)
    assert f"transfer {order.transfer_id} " in dropped.detail


def test_a_failed_transfer_lets_go_of_its_blocks(made):
    request, order = made.start("a")
    assert made.transfers.end(order.transfer_id, arrived=False).request is request
    assert made.told() == [("a", order.transfer_id, "failed")]
    assert made.manager.num_transfers == 0
    assert not made.transfers.has_cancels


def test_expired_is_whose_deadline_has_come(made):
    first, _ = made.start("a", now=1.0)
    second, _ = made.start("b", now=2.0)
    made.start("c", now=3.0)
    assert made.transfers.expired(5.9) == []
    assert made.transfers.expired(6.0) == [first]
    assert made.transfers.expired(7.9) == [first, second]


def test_a_cancelled_transfer_keeps_its_blocks_until_the_worker_was_told(made):
    request, order = made.start("a")
    other, _ = made.start("b")
    made.transfers.cancel(request, "expired")
    assert made.told() == [("a", order.transfer_id, "expired")]
    assert made.transfers.requests() == [other]
    assert made.transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == 0
    assert made.transfers.has_cancels is True
    assert made.transfers.take_cancels() == [order.transfer_id]
    assert made.transfers.has_cancels is False
    assert made.transfers.take_cancels() == []
    assert made.manager.num_transfers == 2
    made.transfers.end_cancels([order.transfer_id])
    assert made.manager.num_transfers == 1


def test_a_failed_step_gives_up_its_own_orders_and_tells_its_cancels_again(made):
    first, order = made.start("a")
    _, stale = made.start("b")
    made.transfers.end(stale.transfer_id, arrived=True)
    made.start("b")  # another transfer of the same id
    _, ended = made.start("c")
    made.transfers.end(ended.transfer_id, arrived=True)
    assert made.transfers.fail_step([order, stale, ended], [77]) == [first]
    assert made.transfers.take_cancels() == [77, order.transfer_id]
    assert made.told()[-1] == ("a", order.transfer_id, "failed")
    assert [request.request_id for request in made.transfers.requests()] == ["b"]


def test_the_store_is_told_of_an_ending_with_the_blocks_that_were_held(made):
    request, _ = made.start("a")
    made.transfers.request_finished(request)
    told = made.store.told[-1]
    assert told == ("finished", "a", [0, 1])
    request.sequence.block_table.clear()
    assert told[2] == [0, 1]
