from __future__ import annotations

import pytest

from octavo.core.event_emitter import EventEmitter
from octavo.core.kv_cache_manager import NO_COMPUTED_BLOCKS, KVCacheManager
from octavo.core.kv_connector import NullConnector
from octavo.core.kv_transfers import KVTransfers
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


class Store:
    """A connector that offers `num_tokens` to everyone and remembers what it was told."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.allocated, self.finished = [], []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.num_tokens

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.allocated.append((request.request_id, block_ids, num_external_tokens))

    def request_finished(self, request, block_ids):
        self.finished.append((request.request_id, block_ids))


class Transfers:
    """Transfers alone: no scheduler, a cache of 20 blocks of 4 tokens, and a clock that is set by hand."""

    def __init__(self, num_tokens=8, timeout_s=10.0, store=None):
        self.store = store or Store(num_tokens)
        self.log = EventLog()
        self.emitter = EventEmitter(self.log)
        self.manager = KVCacheManager(20, 4)
        self.transfers = KVTransfers(self.store, self.manager, timeout_s, self.emitter)

    def start(self, name, num_tokens=8):
        request = Request(name, list(range(12)), SamplingParams(max_tokens=1))
        block_ids = self.manager.allocate_slots(request, num_tokens)
        return request, self.transfers.start(request, NO_COMPUTED_BLOCKS, num_tokens, block_ids)

    @property
    def outcomes(self):
        return [(event.request_id, event.outcome) for event in self.log.of_type(events.KVLoadEnded)]

    @property
    def num_pinned(self):
        return len(self.manager.pinned_blocks())


@pytest.mark.parametrize(("offered", "found"), [(0, 0), (5, 5), (11, 11), (12, 11), (99, 11), (-3, 0)])
def test_one_token_is_always_left_to_compute(offered, found):
    request = Request("a", list(range(12)), SamplingParams(max_tokens=1))
    assert Transfers(offered).transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == found


def test_who_needs_every_position_computed_fetches_nothing():
    request = Request("a", list(range(12)), SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert Transfers().transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == 0


def test_an_order_says_what_is_fetched_and_where_to():
    each = Transfers()
    request, order = each.start("a")
    assert (order.request_id, order.token_ids, order.num_present) == ("a", list(range(8)), 0)
    assert order.block_ids == request.sequence.block_table
    assert order.block_ids is not request.sequence.block_table
    assert each.store.allocated == [("a", order.block_ids, 8)]
    assert (len(each.transfers), each.transfers.requests(), each.num_pinned) == (1, [request], 2)


@pytest.mark.parametrize("arrived", [True, False])
def test_a_transfer_ends_once(arrived):
    each = Transfers()
    request, order = each.start("a")
    load = each.transfers.end(order.transfer_id, arrived=arrived)
    assert (load.request, load.num_tokens) == (request, 8)
    assert each.outcomes == [("a", "done" if arrived else "failed")]
    assert (len(each.transfers), each.num_pinned) == (0, 0)
    assert each.transfers.end(order.transfer_id, arrived=True) is None
    assert each.transfers.end(99, arrived=True) is None
    assert len(each.log.of_type(events.StaleResultDropped)) == 2
    may_ask_again = bool(each.transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS))
    assert may_ask_again == arrived


def test_ids_are_never_used_twice():
    each = Transfers()
    ids = []
    for index in range(6):
        _, order = each.start(f"r{index}", 4)
        ids.append(order.transfer_id)
        each.transfers.end(order.transfer_id, arrived=True)
    assert len(set(ids)) == 6


def test_blocks_of_a_cancelled_transfer_stay_pinned_until_the_worker_was_told():
    each = Transfers()
    request, order = each.start("a")
    each.transfers.cancel(request, "cancelled")
    assert each.outcomes == [("a", "cancelled")]
    assert (len(each.transfers), each.num_pinned, each.transfers.has_cancels) == (0, 2, True)
    assert each.transfers.take_cancels() == [order.transfer_id]
    assert (each.num_pinned, each.transfers.has_cancels, each.transfers.take_cancels()) == (2, False, [])
    each.transfers.end_cancels([order.transfer_id])
    assert each.num_pinned == 0
    assert each.transfers.end(order.transfer_id, arrived=True) is None


def test_the_oldest_expire_first_at_their_time():
    each = Transfers(timeout_s=10.0)
    old, _ = each.start("old", 4)
    each.emitter.now = 5.0
    each.start("young", 4)
    assert each.transfers.expired(9.9) == []
    assert each.transfers.expired(10.0) == [old]
    assert [request.request_id for request in each.transfers.expired(15.0)] == ["old", "young"]
    assert len(each.transfers) == 2  # nothing changed


def test_a_failed_step_gives_up_what_it_ordered_and_repeats_its_cancels():
    each = Transfers()
    earlier, _ = each.start("earlier", 4)
    ended, gone = each.start("ended", 4)
    each.transfers.cancel(ended, "cancelled")
    assert each.transfers.take_cancels() == [gone.transfer_id]
    request, order = each.start("a", 4)
    assert each.transfers.fail_step([order, gone], [gone.transfer_id]) == [request]
    assert each.outcomes[-1] == ("a", "failed")
    assert each.transfers.take_cancels() == [gone.transfer_id, order.transfer_id]
    assert each.transfers.requests() == [earlier]


def test_nothing_is_kept_of_who_ended():
    each = Transfers()
    request, order = each.start("a")
    each.transfers.end(order.transfer_id, arrived=False)
    assert each.transfers.num_records == 1
    each.transfers.request_finished(request)
    assert each.transfers.num_records == 0
    assert each.store.finished == [("a", order.block_ids)]


def test_without_a_store_nothing_is_fetched():
    each = Transfers(store=NullConnector())
    request = Request("a", list(range(12)), SamplingParams(max_tokens=1))
    assert not each.transfers.has_store
    assert each.transfers.num_external_tokens(request, NO_COMPUTED_BLOCKS) == 0
    assert Transfers().transfers.has_store
