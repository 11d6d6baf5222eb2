"""A failing store is not used for a growing time, and costs nothing during that time."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
from faulty_store import HangingStore

from octavo.kv_transfer import guard as guard_module
from octavo.kv_transfer.guard import FIRST_PAUSE_S, HANGS_AFTER_S, LONGEST_PAUSE_S, GuardedStore
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore

KEYS = [bytes([index]) * 32 for index in range(8)]
BLOCK_BYTES = 32


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Failing(MemoryStore):
    """Raises the given error, and counts its calls."""

    def __init__(self):
        super().__init__(GlobalKVPool(), "a", BLOCK_BYTES)
        self.error = None
        self.calls = 0
        self.forgotten = []

    def num_matched(self, keys):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return super().num_matched(keys)

    def lacks(self, keys):
        if self.error is not None:
            raise self.error
        return super().lacks(keys)

    def forget(self, keys):
        self.forgotten += keys
        super().forget(keys)


@pytest.fixture
def made():
    """Return a clock, a store, and the store's guard."""
    clock, store = Clock(), Failing()
    guard = GuardedStore("test", BLOCK_BYTES, lambda: store, clock=clock)
    guard.open()
    return clock, store, guard


def test_failing_store_is_retried_after_growing_pause(made):
    clock, store, guard = made
    store.error = StoreError("gone")
    expected, pauses = FIRST_PAUSE_S, []
    for _ in range(10):
        assert guard.num_matched(KEYS) == 0
        assert not guard.is_usable
        calls = store.calls
        clock.now += expected * 0.99
        assert guard.num_matched(KEYS) == guard.load(KEYS, []) == guard.save(KEYS, []) == 0
        assert guard.lacks(KEYS) == set()
        assert store.calls == calls
        clock.now += expected * 0.02
        assert guard.is_usable
        pauses.append(expected)
        expected = min(2 * expected, LONGEST_PAUSE_S)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert store.calls == 10
    assert guard.stats().num_errors == 10
    store.error = None
    guard.save(KEYS[:2], [memoryview(key) for key in KEYS[:2]])
    assert guard.num_matched(KEYS) == 2
    store.error = StoreError("gone again")
    guard.num_matched(KEYS)
    clock.now += FIRST_PAUSE_S * 1.01  # the pauses start again at the first one
    assert guard.is_usable


def test_one_call_retries_store_after_pause(made):
    clock, store, guard = made
    store.error = StoreError("gone")
    guard.num_matched(KEYS)
    clock.now += FIRST_PAUSE_S
    entered, release = threading.Event(), threading.Event()

    def try_it(keys):
        entered.set()
        release.wait()
        return 0

    store.num_matched = try_it
    thread = threading.Thread(target=guard.num_matched, args=(KEYS,))
    thread.start()
    assert entered.wait(10)
    assert not guard.is_usable
    assert guard.num_matched(KEYS) == 0
    release.set()
    thread.join()
    assert guard.is_usable


def test_failure_and_recovery_are_logged_once(made, caplog):
    clock, store, guard = made
    store.error = StoreError("gone")
    with caplog.at_level(logging.INFO, guard_module.__name__):
        for _ in range(3):
            guard.num_matched(KEYS)
            clock.now += LONGEST_PAUSE_S
        store.error = None
        for _ in range(3):
            guard.num_matched(KEYS)
    assert [record.getMessage() for record in caplog.records] == [
        "KV store test is not used for a while, then retried: gone",
        "KV store test works again",
    ]
    assert guard.stats().error == ""


@pytest.mark.parametrize("error", [ZeroDivisionError("wrong"), OSError(5, "EIO"), StoreError("")])
def test_any_exception_of_store_is_a_miss(made, error):
    clock, store, guard = made
    store.error = error
    assert guard.num_matched(KEYS) == 0
    assert guard.stats().error
    clock.now += FIRST_PAUSE_S
    assert guard.lacks(KEYS) == set()
    assert not guard.is_usable


def test_hanging_call_makes_store_unusable_until_it_returns():
    clock, pool = Clock(), GlobalKVPool()
    store = HangingStore(pool, "a", BLOCK_BYTES, "num_matched")
    guard = GuardedStore("test", BLOCK_BYTES, lambda: store, clock=clock)
    guard.open()
    thread = threading.Thread(target=guard.num_matched, args=(KEYS,))
    thread.start()
    assert store.entered.wait(10)
    assert guard.is_usable
    clock.now += HANGS_AFTER_S + 0.1
    assert not guard.is_usable
    assert guard.load(KEYS, []) == 0
    assert "taken more than" in guard.stats().error
    store.release.set()
    thread.join()
    assert guard.is_usable
    assert guard.stats().error == ""


def test_partial_or_failed_load_forgets_no_blocks(made):
    clock, store, guard = made
    guard.save(KEYS[:3], [memoryview(key) for key in KEYS[:3]])
    load, store.load = store.load, lambda keys, blocks: load(keys[:1], blocks[:1])
    assert guard.load(KEYS[:3], [memoryview(bytearray(BLOCK_BYTES)) for _ in range(3)]) == 1
    assert store.forgotten == []
    store.load = lambda keys, blocks: 1 / 0
    assert guard.load(KEYS[:1], [memoryview(bytearray(BLOCK_BYTES))]) == 0
    clock.now += FIRST_PAUSE_S
    assert guard.num_matched(KEYS[:3]) == 3


def test_store_opened_after_close_is_closed():
    is_opening, may_open, closed = threading.Event(), threading.Event(), []

    def open_store():
        is_opening.set()
        assert may_open.wait(10)
        store = MemoryStore(GlobalKVPool(), "a", BLOCK_BYTES)
        store.close = lambda: closed.append(store)
        return store

    guard = GuardedStore("slow", BLOCK_BYTES, open_store)
    opening = threading.Thread(target=guard.open)
    opening.start()
    assert is_opening.wait(10)
    guard.close()
    may_open.set()
    opening.join(10)
    assert len(closed) == 1
    assert not guard.is_usable
    assert guard.stats().error == "it is closed"


def test_metrics_report_store_with_hanging_call_as_unusable(made):
    clock, store, guard = made
    is_pending, may_answer = threading.Event(), threading.Event()

    def hang(_keys):
        is_pending.set()
        may_answer.wait(10)
        return 0

    store.num_matched = hang
    asking = threading.Thread(target=guard.num_matched, args=(KEYS,))
    asking.start()
    assert is_pending.wait(10)
    assert guard.figures.is_usable == 1
    clock.now += HANGS_AFTER_S + 1
    assert not guard.is_usable
    assert guard.figures.is_usable == 0
    may_answer.set()
    asking.join(10)
    assert guard.is_usable
    assert guard.figures.is_usable == 1


def test_is_usable_metric_needs_successful_call():
    clock, is_there = Clock(), []

    def open_store():
        if not is_there:
            raise StoreError("no master")
        return Failing()

    guard = GuardedStore("far", BLOCK_BYTES, open_store, clock=clock)
    assert guard.is_usable  # it may be called
    assert guard.figures.is_usable == 0
    guard.open()
    for _ in range(3):
        clock.now += LONGEST_PAUSE_S
        assert guard.is_usable
        assert guard.figures.is_usable == 0, "a pause that is over is no proof"
        guard.num_matched(KEYS)
    is_there.append(True)
    clock.now += LONGEST_PAUSE_S
    guard.num_matched(KEYS)
    assert guard.figures.is_usable == 1
    guard.close()
    assert guard.figures.is_usable == 0


def test_only_idle_store_is_checked(made):
    clock, store, guard = made
    clock.now += 4.9
    guard.check(5.0)
    assert store.calls == 0
    clock.now += 0.1
    store.error = StoreError("the master is gone")
    guard.check(5.0)
    assert (store.calls, guard.figures.is_usable) == (1, 0)
    clock.now += FIRST_PAUSE_S / 2
    guard.check(0.0)
    assert store.calls == 1, "it is left alone for a pause"
    store.error = None
    clock.now += 5.0
    guard.check(5.0)
    assert (store.calls, guard.figures.is_usable) == (2, 1)
    guard.num_matched(KEYS)
    clock.now += 4.0
    guard.check(5.0)
    assert store.calls == 3


def test_check_thread_ends_when_guard_is_closed_or_dropped(made):
    for ends in (lambda guard: guard.close(), lambda _: None):
        guard = GuardedStore("test", BLOCK_BYTES, Failing)
        before = set(threading.enumerate())
        guard.check_when_idle(0.001)
        [thread] = set(threading.enumerate()) - before
        ends(guard)
        del guard
        thread.join(10)
        assert not thread.is_alive()


def test_check_thread_is_daemon(made, monkeypatch):
    threads = []
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(threading, "Thread", lambda **options: (threads.append(options), thread)[1])
    made[2].check_when_idle(7.0)
    [options] = threads
    assert (options["daemon"], options["name"]) == (True, "octavo-kv-check-test")
    assert options["args"][1:] == (made[2]._is_over, 7.0)


def test_take_evicted_reports_each_eviction_once(made):
    _, store, guard = made
    counts = iter([2, 2, 5, 0, 6])
    store.stats = lambda: StoreStats(0, 0, None, num_evicted=next(counts))
    told = []
    for _ in range(5):
        guard.save(KEYS[:1], [memoryview(bytes(BLOCK_BYTES))])
        told.append(guard.take_evicted())
    assert told == [2, 0, 3, 0, 1]
    assert guard.take_evicted() == 0


def test_impossible_counts_are_capped(made):
    _, store, guard = made
    store.num_matched = store.load = store.save = lambda *_: 99
    assert guard.num_matched(KEYS) == guard.load(KEYS, []) == guard.save(KEYS, []) == len(KEYS)


def test_store_down_at_startup_is_opened_later(caplog):
    clock, answers = Clock(), [StoreError("no route"), None]

    def open_store():
        error = answers.pop(0)
        if error is not None:
            raise error
        return MemoryStore(GlobalKVPool(), "a", BLOCK_BYTES)

    guard = GuardedStore("far", BLOCK_BYTES, open_store, clock=clock)
    assert guard.lacks(KEYS) == set()
    guard.open()
    assert guard.stats().error == "no route"
    assert not guard.is_usable
    clock.now += FIRST_PAUSE_S
    assert guard.num_matched(KEYS) == 0
    assert guard.lacks(KEYS) == set(KEYS)
    assert not answers


def test_closed_store_gets_no_calls(made):
    _, store, guard = made
    guard.close()
    calls = store.calls
    assert guard.num_matched(KEYS) == 0
    assert store.calls == calls
    assert guard.lacks(KEYS) == set()


def test_store_that_may_wait_never_counts_as_hanging():
    clock = Clock()
    store = HangingStore(GlobalKVPool(), "a", BLOCK_BYTES, "load")
    guard = GuardedStore("direct", BLOCK_BYTES, lambda: store, clock=clock, may_wait=True)
    waiting = threading.Thread(target=guard.load, args=(KEYS[:1], [memoryview(bytearray(BLOCK_BYTES))]))
    waiting.start()
    assert store.entered.wait(10)
    clock.now += 100 * HANGS_AFTER_S
    assert guard.is_usable
    assert guard.save(KEYS[:1], [memoryview(KEYS[0])]) == 1
    assert guard.stats().error == ""
    store.release.set()
    waiting.join()


def test_unopened_store_has_empty_stats():
    guard = GuardedStore("far", BLOCK_BYTES, lambda: pytest.fail("the store is opened"))
    assert guard.stats() == StoreStats(0, 0, None)
    assert (guard.keeps_parts, guard.name, guard.block_bytes) == (True, "far", BLOCK_BYTES)


def test_failing_stats_are_empty_and_pause_store(made):
    clock, store, guard = made
    store.stats = lambda: 1 / 0
    assert guard.stats() == StoreStats(0, 0, None, num_errors=1, error="division by zero")
    assert not guard.is_usable
    clock.now += FIRST_PAUSE_S
    assert guard.is_usable


def test_stats_combine_store_and_guard_errors(made):
    clock, store, guard = made
    store.stats = lambda: StoreStats(1, 2, 3, 4, 5, 6, "its own error")
    assert guard.stats() == StoreStats(1, 2, 3, 4, 5, 6, "its own error")
    store.error = StoreError("gone")
    for _ in range(7):
        guard.num_matched(KEYS)
        clock.now += LONGEST_PAUSE_S
    assert guard.stats() == StoreStats(1, 2, 3, 4, 5, 7, "gone")


def test_metrics_follow_last_load_or_save(made):
    clock, store, guard = made
    told = [StoreStats(1, 2, 3, 4, 5, 6), StoreStats(7, 8, 9, 3, 4, 5)]
    store.stats = lambda: told[0]
    block = memoryview(bytearray(BLOCK_BYTES))
    for call in (guard.load, guard.save):
        call(KEYS[:1], [block])
        figures = guard.figures
        assert (figures.num_blocks, figures.num_bytes, figures.num_corrupt) == (
            told[0].num_blocks, told[0].num_bytes, told[0].num_corrupt,
        )  # fmt: skip
        assert (figures.num_errors, guard._num_evicted) == (6, 4), "these never become fewer"
        told.reverse()
    store.error = StoreError("gone")
    for count in range(1, 9):
        guard.num_matched(KEYS)
        assert guard.figures.num_errors == max(count, 6)
        clock.now += LONGEST_PAUSE_S


def test_metrics_count_first_failure(made):
    _, store, guard = made
    store.error = StoreError("gone")
    guard.num_matched(KEYS)
    assert (guard.figures.num_errors, guard.figures.is_usable) == (1, 0)


def test_guard_of_open_store_is_usable_at_once():
    store = Failing()
    for options in ({}, {"may_wait": True, "keeps_parts": False}):
        guard = GuardedStore.of(store, **options)
        assert (guard.figures.is_usable, guard.lacks(KEYS)) == (1, set(KEYS))
        assert (guard._may_wait, guard.keeps_parts) == (bool(options), not options)
        assert (guard.name, guard.block_bytes) == ("memory", BLOCK_BYTES)


def test_call_counts_as_hanging_only_after_limit(made):
    clock, store, guard = made
    with guard._call():
        clock.now += HANGS_AFTER_S
        assert guard.is_usable
        clock.now += 0.01
        assert not guard.is_usable
        assert guard.stats().error == "a call has taken more than 5 s"
        assert (guard.num_matched(KEYS), store.calls) == (0, 0)
        with guard._call():
            assert not guard.is_usable, "one of several hangs"
    assert guard._calls == {}


def test_retry_is_allowed_exactly_at_end_of_pause(made):
    clock, store, guard = made
    store.error = StoreError("gone")
    guard.num_matched(KEYS)
    clock.now += FIRST_PAUSE_S
    assert guard.is_usable
    guard.num_matched(KEYS)
    assert store.calls == 2


def test_idle_time_starts_at_creation(made):
    clock, store, _ = made
    guard = GuardedStore("new", BLOCK_BYTES, lambda: store, clock=clock)
    guard.check(5.0)
    assert guard._store is None
    clock.now += 5.0
    guard.check(5.0)
    assert guard._store is store


def test_failing_close_is_logged_and_not_raised(made, caplog):
    _, store, guard = made
    store.close = lambda: 1 / 0
    guard.close()
    assert guard.stats().num_errors == 1
    assert [record.getMessage() for record in caplog.records] == [
        "KV store test failed; it is not used for a while, then retried"
    ]
    assert caplog.records[0].exc_info is not None


def test_closing_unopened_store_does_not_open_it():
    guard = GuardedStore("far", BLOCK_BYTES, lambda: pytest.fail("the store is opened"))
    guard.close()
    assert (guard.stats().num_errors, guard.is_usable) == (0, False)
    guard.open()


def test_forget_reaches_store(made):
    _, store, guard = made
    guard.forget(KEYS[:2])
    assert store.forgotten == KEYS[:2]


def test_error_without_message_is_named_by_type(made):
    _, store, guard = made
    store.error = StoreError("")
    guard.num_matched(KEYS)
    assert guard.stats().error == "StoreError"


def test_store_is_opened_once():
    opened = []
    guard = GuardedStore("test", BLOCK_BYTES, lambda: (opened.append(None), Failing())[1])
    for _ in range(3):
        guard.open()
    assert len(opened) == 1
