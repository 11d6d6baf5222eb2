"""The scheduler's part of a store: no call blocks, a lookup runs once, and state of ended requests is dropped."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from faulty_store import HangingStore

from octavo.data.kv_groups import SlidingWindow
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.kv_transfer import connector, guard
from octavo.kv_transfer.connector import StoreConnector, _Lookup
from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore

KEYS = [bytes([index]) * 32 for index in range(8)]
SIZE = 4


class Asked:
    """A connector over a store that has the first three blocks. answers: counts the lookups that have ended."""

    def __init__(self, store=None):
        self.store = store or MemoryStore(GlobalKVPool(), "a", 32)
        self.store.save(KEYS[:3], [memoryview(key) for key in KEYS[:3]])
        self.answers = threading.Semaphore(0)
        self.connector = StoreConnector(TieredStore([self.store]), SIZE, self.answers.release)

    def ask(self, request, num_tokens=0):
        return self.connector.get_num_new_matched_tokens(request, num_tokens)

    def answer(self, request, num_tokens=0):
        """Ask, wait until the lookup has ended, and ask again."""
        if (found := self.ask(request, num_tokens)) is not None:
            return found
        assert self.answers.acquire(timeout=10)
        return self.ask(request, num_tokens)


def request(name="r", count=6, *, expects_kv=False):
    return SimpleNamespace(
        request_id=name,
        block_hashes=KEYS[:count],
        expects_kv=expects_kv,
        num_prompt_tokens=SIZE * count + 1,
        num_tokens=SIZE * count + 1,
    )


def test_lookup_runs_asynchronously_and_is_cached():
    asked = Asked()
    one = request()
    assert asked.ask(one) is None
    assert asked.answer(one) == 3 * SIZE
    asked.store.num_matched = lambda _: pytest.fail("it was asked again")
    assert asked.ask(one) == 3 * SIZE
    assert asked.ask(one, SIZE) == 2 * SIZE
    assert asked.ask(one, 5 * SIZE) == 0


def test_lookup_repeats_for_earlier_or_new_blocks():
    asked = Asked()
    assert asked.answer(request(), SIZE * 3) == 0
    assert asked.answer(request(), 0) == 3 * SIZE
    asked.store.save(KEYS[3:4], [memoryview(KEYS[3])])
    assert asked.answer(request()) == 3 * SIZE
    assert asked.answer(request(count=7)) == 4 * SIZE


def test_finished_requests_leave_no_lookups():
    asked = Asked()
    for index in range(20):
        asked.answer(request(str(index)))
    for index in range(20):
        asked.connector.request_finished(request(str(index)), [])
    assert asked.connector.num_lookups == 0


def test_queued_lookup_of_finished_request_is_skipped():
    store = HangingStore(GlobalKVPool(), "a", 32, "num_matched")
    asked = Asked(store)
    seen = []
    store.hangs = {"num_matched"}
    look_up = store.num_matched
    store.num_matched = lambda keys: (seen.append(len(keys)), look_up(keys))[1]
    for index in range(6):  # two threads hang, four lookups wait
        assert asked.ask(request(str(index), index + 1)) is None
    assert store.entered.wait(10)
    for index in range(6):
        asked.connector.request_finished(request(str(index)), [])
    store.release.set()
    for _ in range(6):
        assert asked.answers.acquire(timeout=10)
    assert len(seen) <= 2


def test_failed_store_gets_no_further_lookups():
    asked = Asked()

    def fail(_):
        raise StoreError("gone")

    asked.store.num_matched = fail
    assert asked.answer(request("first")) == 0
    asked.store.num_matched = lambda _: pytest.fail("it was asked")
    assert asked.ask(request("second")) == 0
    assert asked.connector.keys_to_save(KEYS) == set()


def test_hanging_store_gets_no_further_lookups(monkeypatch):
    monkeypatch.setattr(guard, "HANGS_AFTER_S", -1.0)  # a call counts as hanging from its beginning
    store = HangingStore(GlobalKVPool(), "a", 32, "num_matched")
    asked = Asked(store)
    assert asked.ask(request("first")) is None
    assert store.entered.wait(10)
    assert asked.ask(request("second")) == 0
    asked.connector.close()
    store.release.set()


def test_keys_to_save_are_missing_keys_of_store():
    asked = Asked()
    asked.answer(request())
    assert asked.connector.keys_to_save(KEYS[1:5]) == set(KEYS[3:5])


def test_partial_load_triggers_new_lookup():
    asked = Asked()
    assert asked.answer(request()) == 3 * SIZE
    order = KVTransfer(0, TransferDirection.LOAD, KEYS[:3], [1, 2, 3], "r")
    asked.connector.transfer_ended(order, 3)
    assert asked.connector.num_lookups == 1
    for count, expected in ((2, 2), (None, 3)):
        asked.connector.transfer_ended(order, count)
        assert asked.ask(request()) is None
        assert asked.answer(request()) == expected * SIZE
    asked.connector.transfer_ended(KVTransfer(1, TransferDirection.SAVE, KEYS[:1], [1]), None)
    assert asked.connector.num_lookups == 1


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait long for expected blocks, in case this process is stopped for a while."""
    monkeypatch.setattr(connector, "_EXPECTED_S", 60.0)


def save(asked, *indices):
    asked.store.save([KEYS[index] for index in indices], [memoryview(KEYS[index]) for index in indices])


def polled(asked, one, seconds=10.0):
    """Ask repeatedly, as steps do, until the answer is known or `seconds` have passed."""
    end = time.monotonic() + seconds
    while (found := asked.ask(one)) is None and time.monotonic() < end:
        time.sleep(0.002)
    return found


def test_expected_blocks_are_polled_until_complete():
    asked = Asked()
    one = request(expects_kv=True)
    assert asked.ask(one) is None
    for index in (3, 4):
        assert asked.answers.acquire(timeout=10)  # not all blocks are found
        save(asked, index)
        assert polled(asked, one, 0.05) is None
    save(asked, 5)
    assert polled(asked, one) == 6 * SIZE
    asked.store.num_matched = lambda _: pytest.fail("it was asked again")
    assert asked.ask(one) == 6 * SIZE
    asked.connector.request_finished(one, [])
    assert asked.connector.num_lookups == 0


def test_blocks_after_prompt_are_not_expected():
    asked = Asked()
    one = request(expects_kv=True)
    one.num_prompt_tokens = 3 * SIZE + 3
    assert asked.ask(one) is None
    assert asked.answers.acquire(timeout=10)
    assert asked.ask(one) == 3 * SIZE


def test_available_blocks_are_used_after_expected_timeout(monkeypatch):
    monkeypatch.setattr(connector, "_EXPECTED_S", 0.1)
    asked = Asked()
    start = time.monotonic()
    assert polled(asked, request(expects_kv=True)) == 3 * SIZE
    assert 0.1 <= time.monotonic() - start < 5
    assert polled(asked, request("unexpected")) == 3 * SIZE


def test_waiting_for_expected_blocks_holds_no_lookup_thread():
    asked = Asked()
    waiting = [request(str(index), expects_kv=True) for index in range(8)]
    for one in waiting:
        assert asked.ask(one) is None
    for _ in waiting:
        assert asked.answers.acquire(timeout=10)
    assert polled(asked, request("other")) == 3 * SIZE
    assert [asked.ask(one) for one in waiting] == [None] * 8


def test_failed_store_is_not_polled_for_expected_blocks():
    asked = Asked()

    def fail(_):
        raise StoreError("gone")

    asked.store.num_matched = fail
    assert asked.answer(request("first")) == 0
    assert asked.ask(request("second", expects_kv=True)) == 0


# --- on the thread of the test ----------------------------------------------------------------------------------------


class Threads:
    """Threads that run their work when the test calls `run`."""

    def __init__(self, *options):
        self.options, self.left, self.closed = options, [], []

    def submit(self, work):
        self.left.append(work)

    def close(self, timeout_s):
        self.closed.append(timeout_s)

    def run(self):
        while self.left:
            self.left.pop(0)()


class Store:
    """A store that finds the first `count` of any keys."""

    name, is_usable = "store", True

    def __init__(self, count=3):
        self.count, self.asked, self.num_opened = count, [], 0

    def open(self):
        self.num_opened += 1

    def num_matched(self, keys, **_):
        self.asked.append(list(keys))
        return min(self.count, len(keys))


class Direct:
    """This engine's side of direct transfers. told: records the calls."""

    def __init__(self, *, expects=False):
        self.expects, self.told = expects, []

    def expect(self, request):
        self.told.append(("expect", request.request_id))
        return self.expects

    def __getattr__(self, name):
        return lambda argument: self.told.append((name, getattr(argument, "request_id", argument)))


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(connector, "_EXPECTED_S", 1.0)
    monkeypatch.setattr(connector, "DaemonThreads", Threads)
    return clock


def connected(store, direct=None, kinds=()):
    answers = []
    made = StoreConnector(store, SIZE, lambda: answers.append(None), direct, kinds)
    made._threads.run()
    return made, answers


def ask(made, one, num_tokens=0):
    """Ask, let the store answer, and ask again."""
    if (found := made.get_num_new_matched_tokens(one, num_tokens)) is None:
        made._threads.run()
        found = made.get_num_new_matched_tokens(one, num_tokens)
    return found


def load_order(count, name="r"):
    return KVTransfer(0, TransferDirection.LOAD, KEYS[:count], [[0] * count], name)


def test_store_is_opened_on_lookup_thread(clock):
    store = Store()
    made, answers = connected(store)
    assert (store.num_opened, made.name, answers) == (1, "store", [])
    assert made._threads.options == (2, "octavo-kv-lookup", guard.HANGS_AFTER_S)
    made.close()
    assert made._threads.closed == [0.0]


def test_lookup_covers_only_blocks_after_computed_ones(clock):
    store = Store()
    made, answers = connected(store)
    one = request()
    assert ask(made, one, 2 * SIZE + 1) == 3 * SIZE
    assert (store.asked, len(answers)) == ([KEYS[2:6]], 1)
    assert ask(made, one, 3 * SIZE) == 2 * SIZE
    assert ask(made, one, 6 * SIZE) == 0
    assert len(store.asked) == 1
    assert ask(made, one, SIZE) == 3 * SIZE
    assert store.asked[1:] == [KEYS[1:6]]


def test_direct_connector_receives_every_request_event(clock):
    direct = Direct()
    made, _ = connected(Store(), direct)
    one = request()
    made.request_added(one)
    ask(made, one)
    order = load_order(3)
    made.transfer_ordered(order)
    made.transfer_ended(order, 3)
    ask(made, request(count=7))
    made.lookup_given_up(one)
    made.request_finished(one, [])
    assert direct.told == [
        ("request_added", "r"), ("expect", "r"), ("transfer_ordered", "r"), ("transfer_ended", "r"),
        ("forget_expected", "r"), ("expect", "r"), ("forget_expected", "r"), ("request_finished", "r"),
    ]  # fmt: skip


def test_blocks_of_direct_transfer_are_looked_up_once(clock):
    direct, store = Direct(expects=True), Store(2)
    made, _ = connected(store, direct)
    one = request(expects_kv=True)
    assert ask(made, one) == 2 * SIZE, "what comes directly is not waited for here"
    made.transfer_ended(load_order(2), 2)
    assert made.num_lookups == 0


def test_expected_blocks_are_polled_with_growing_pauses(clock):
    store = Store(1)
    made, answers = connected(store)
    one = request(count=3, expects_kv=True)
    assert ask(made, one) is None
    pauses = []
    for _ in range(5):
        again_at = made._lookups["r"].again_at
        pauses.append(again_at - clock.now)
        clock.now = again_at - 0.001
        assert ask(made, one) is None
        asked = len(store.asked)
        clock.now = again_at
        assert made.get_num_new_matched_tokens(one, 0) is None
        assert made.get_num_new_matched_tokens(one, 0) is None
        assert len(made._threads.left) == 1, "it is being asked"
        made._threads.run()
        assert len(store.asked) == asked + 1
    assert pauses == [pytest.approx(each) for each in (0.005, 0.01, 0.02, 0.04, 0.04)]
    store.count = 3
    clock.now += 0.04
    assert ask(made, one) == 3 * SIZE
    assert len(answers) == len(store.asked)


def test_missing_expected_blocks_are_polled_until_timeout(clock):
    made, _ = connected(Store(0))
    one = request(expects_kv=True)
    assert ask(made, one) is None
    clock.now += 0.99
    assert ask(made, one) is None
    clock.now += 0.04
    assert ask(made, one) == 0


def test_only_full_prompt_blocks_are_expected(clock):
    made, _ = connected(Store(2))
    one = request(expects_kv=True)
    one.num_prompt_tokens = 3 * SIZE - 1
    assert ask(made, one) == 2 * SIZE
    one = request("other", expects_kv=True)
    one.num_prompt_tokens = 3 * SIZE
    assert ask(made, one) is None
    clock.now += 1.0
    assert ask(made, one) == 2 * SIZE


def test_partial_load_limits_next_lookup(clock):
    store = Store(9)
    made, _ = connected(store)
    one = request()
    assert ask(made, one) == 6 * SIZE
    made.transfer_ended(load_order(6), 4)
    assert (ask(made, one), store.asked[-1]) == (4 * SIZE, KEYS[:4])
    made.lookup_given_up(one)
    assert (ask(made, one, 5 * SIZE), store.asked[-1]) == (SIZE, KEYS[5:6]), "the block before is computed meanwhile"
    made.transfer_ended(load_order(6), 6)
    made.lookup_given_up(one)
    assert ask(made, one) == 6 * SIZE
    made.transfer_ended(load_order(6), None)
    assert made.num_lookups == 0
    made.transfer_ended(KVTransfer(1, TransferDirection.SAVE, KEYS[:1], [[1]]), 0)
    assert made.num_lookups == 0


def test_number_of_lookups_counts_requests_once(clock):
    made, _ = connected(Store())
    ask(made, request())
    made.transfer_ended(load_order(3), 1)
    assert made.num_lookups == 1
    ask(made, request())
    assert made.num_lookups == 1
    made.request_finished(request(), [])
    assert made.num_lookups == 0


@pytest.mark.parametrize("kinds", [[], [SlidingWindow(5)]])
def test_abandoned_lookup_does_not_query_store(clock, kinds):
    store = Store()
    made, answers = connected(store, kinds=kinds)
    made.get_num_new_matched_tokens(request(), 0)
    made.lookup_given_up(request())
    made._threads.run()
    assert (store.asked, len(answers)) == ([], 1)


def test_unusable_store_is_not_queried(clock):
    store, direct = Store(), Direct()
    made, answers = connected(store, direct)
    store.is_usable = False
    assert made.get_num_new_matched_tokens(request(), SIZE) == 0
    assert (made._threads.left, direct.told, answers) == ([], [], [])


def test_failing_lookup_ends_with_zero_blocks(clock):
    store = Store()
    made, answers = connected(store)
    store.num_matched = lambda _: 1 / 0
    made.get_num_new_matched_tokens(request(), 0)
    with pytest.raises(ZeroDivisionError):
        made._threads.run()
    assert (made.get_num_new_matched_tokens(request(), 0), len(answers)) == (0, 1)


def test_new_blocks_extend_lookup_deadline(clock):
    lookup = _Lookup(2, 8, num_expected=8, found=2, until=101.0)
    lookup.take(1, 100.9)
    assert (lookup.found, lookup.until, lookup.end) == (3, 101.9, None)
    lookup.take(1, 101.0)
    assert (lookup.until, lookup.end) == (101.9, None)
    lookup.take(1, 101.9)
    assert lookup.end == 3
    assert _Lookup(0, 1) == _Lookup(0, 1, False, 0, None, True, 0.0, 0, 0.005, None)
