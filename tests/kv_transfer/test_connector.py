"""The scheduler's half of a store: nothing waits, an answer is asked for once, nothing is kept of who has ended."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from faulty_store import HangingStore

from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.kv_transfer import connector, guard
from octavo.kv_transfer.connector import StoreConnector
from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore

KEYS = [bytes([index]) * 32 for index in range(8)]
SIZE = 4


class Asked:
    """A connector over a store that has the first three blocks, and who is told of answers."""

    def __init__(self, store=None):
        self.store = store or MemoryStore(GlobalKVPool(), "a", 32)
        self.store.save(KEYS[:3], [memoryview(key) for key in KEYS[:3]])
        self.answers = threading.Semaphore(0)
        self.connector = StoreConnector(TieredStore([self.store]), SIZE, self.answers.release)

    def ask(self, request, num_tokens=0):
        return self.connector.get_num_new_matched_tokens(request, num_tokens)

    def answer(self, request, num_tokens=0):
        """Ask, wait until it is known, and ask again."""
        if (found := self.ask(request, num_tokens)) is not None:
            return found
        assert self.answers.acquire(timeout=10)
        return self.ask(request, num_tokens)


def request(name="r", count=6, *, expects_kv=False):
    return SimpleNamespace(
        request_id=name, block_hashes=KEYS[:count], expects_kv=expects_kv, num_prompt_tokens=SIZE * count + 1
    )


def test_an_answer_comes_beside_the_steps_and_is_kept():
    asked = Asked()
    one = request()
    assert asked.ask(one) is None
    assert asked.answer(one) == 3 * SIZE
    asked.store.num_matched = lambda _: pytest.fail("it was asked again")
    assert asked.ask(one) == 3 * SIZE
    assert asked.ask(one, SIZE) == 2 * SIZE
    assert asked.ask(one, 5 * SIZE) == 0


def test_it_is_asked_again_for_what_stands_before_or_is_new():
    asked = Asked()
    assert asked.answer(request(), SIZE * 3) == 0
    assert asked.answer(request(), 0) == 3 * SIZE
    asked.store.save(KEYS[3:4], [memoryview(KEYS[3])])
    assert asked.answer(request()) == 3 * SIZE
    assert asked.answer(request(count=7)) == 4 * SIZE


def test_nothing_is_kept_of_a_request_that_ended():
    asked = Asked()
    for index in range(20):
        asked.answer(request(str(index)))
    for index in range(20):
        asked.connector.request_finished(request(str(index)), [])
    assert asked.connector.num_lookups == 0


def test_who_ended_before_it_was_asked_for_is_not_asked_for():
    store = HangingStore(GlobalKVPool(), "a", 32, "num_matched")
    asked = Asked(store)
    seen = []
    store.hangs = {"num_matched"}
    look_up = store.num_matched
    store.num_matched = lambda keys: (seen.append(len(keys)), look_up(keys))[1]
    for index in range(6):  # two threads hang, four wait
        assert asked.ask(request(str(index), index + 1)) is None
    assert store.entered.wait(10)
    for index in range(6):
        asked.connector.request_finished(request(str(index)), [])
    store.release_unread.set()
    for _ in range(6):
        assert asked.answers.acquire(timeout=10)
    assert len(seen) <= 2


def test_a_store_that_is_not_usable_costs_no_lookup():
    asked = Asked()

    def fail(_):
        raise StoreError("gone")

    asked.store.num_matched = fail
    assert asked.answer(request("first")) == 0
    asked.store.num_matched = lambda _: pytest.fail("it was asked")
    assert asked.ask(request("second")) == 0
    assert asked.connector.keys_to_save(KEYS) == set()


def test_a_store_that_hangs_is_not_asked_for_long(monkeypatch):
    monkeypatch.setattr(guard, "HANGS_AFTER_S", -1.0)  # from its beginning on
    store = HangingStore(GlobalKVPool(), "a", 32, "num_matched")
    asked = Asked(store)
    assert asked.ask(request("first")) is None
    assert store.entered.wait(10)
    assert asked.ask(request("second")) == 0
    asked.connector.close()
    store.release_unread.set()


def test_it_wants_what_the_store_lacks():
    asked = Asked()
    asked.answer(request())
    assert asked.connector.keys_to_save(KEYS[1:5]) == set(KEYS[3:5])


def test_a_load_that_came_short_is_asked_for_anew():
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
    """What is expected is waited for, also where this process is stopped for a while."""
    monkeypatch.setattr(connector, "_EXPECTED_S", 60.0)


def save(asked, *indices):
    asked.store.save([KEYS[index] for index in indices], [memoryview(KEYS[index]) for index in indices])


def polled(asked, one, seconds=10.0):
    """Ask as steps do, until it is known."""
    end = time.monotonic() + seconds
    while (found := asked.ask(one)) is None and time.monotonic() < end:
        time.sleep(0.002)
    return found


def test_what_is_expected_is_asked_for_until_all_of_it_is_there():
    asked = Asked()
    one = request(expects_kv=True)
    assert asked.ask(one) is None
    for index in (3, 4):
        assert asked.answers.acquire(timeout=10)  # it is not all
        save(asked, index)
        assert polled(asked, one, 0.05) is None
    save(asked, 5)
    assert polled(asked, one) == 6 * SIZE
    asked.store.num_matched = lambda _: pytest.fail("it was asked again")
    assert asked.ask(one) == 6 * SIZE
    asked.connector.request_finished(one, [])
    assert asked.connector.num_lookups == 0


def test_blocks_behind_the_prompt_are_not_expected():
    asked = Asked()
    one = request(expects_kv=True)
    one.num_prompt_tokens = 3 * SIZE + 3
    assert asked.ask(one) is None
    assert asked.answers.acquire(timeout=10)
    assert asked.ask(one) == 3 * SIZE


def test_what_is_there_is_taken_when_nothing_more_comes(monkeypatch):
    monkeypatch.setattr(connector, "_EXPECTED_S", 0.1)
    asked = Asked()
    start = time.monotonic()
    assert polled(asked, request(expects_kv=True)) == 3 * SIZE
    assert 0.1 <= time.monotonic() - start < 5
    assert polled(asked, request("unexpected")) == 3 * SIZE


def test_waiting_for_what_is_expected_takes_no_thread_from_others():
    asked = Asked()
    waiting = [request(str(index), expects_kv=True) for index in range(8)]
    for one in waiting:
        assert asked.ask(one) is None
    for _ in waiting:
        assert asked.answers.acquire(timeout=10)
    assert polled(asked, request("other")) == 3 * SIZE
    assert [asked.ask(one) for one in waiting] == [None] * 8


def test_a_store_that_fails_is_not_waited_for():
    asked = Asked()

    def fail(_):
        raise StoreError("gone")

    asked.store.num_matched = fail
    assert asked.answer(request("first")) == 0
    assert asked.ask(request("second", expects_kv=True)) == 0
