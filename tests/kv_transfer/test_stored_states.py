"""Recurrent states in stores: their pieces, and the lookups of the last usable state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.data.kv_groups import SlidingWindow
from octavo.kv_transfer import connector
from octavo.kv_transfer.connector import StoreConnector
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.stored_states import count_pieces, find_state, keys_of_state
from octavo.kv_transfer.tiers import TieredStore

SIZE, BLOCK_BYTES, NUM_PIECES = 4, 24, 3
KEYS = [bytes([number]) * 32 for number in range(8)]


class Asked(TieredStore):
    """A store with some blocks and states, which records its lookups."""

    def __init__(self, num_blocks=8, states=()):
        super().__init__([MemoryStore(GlobalKVPool(), "a", BLOCK_BYTES)])
        self.asked = []
        self.put(KEYS[:num_blocks])
        for number in states:
            self.put(keys_of_state(KEYS[number], NUM_PIECES))

    def put(self, keys):
        self.save(keys, [memoryview(bytes(BLOCK_BYTES))] * len(keys))

    def num_matched(self, keys, **options):
        self.asked.append(list(keys))
        return super().num_matched(keys, **options)


def find(store, num_tokens=33, first=0, *, is_whole=None, kinds=(), most_lookups=9):
    keys = KEYS[first:]
    whole = [True] * len(keys) if is_whole is None else is_whole
    return find_state(
        store, keys, whole, first, num_tokens, SIZE, kinds, num_pieces=NUM_PIECES, most_lookups=most_lookups
    )  # fmt: skip


@pytest.mark.parametrize(("state_bytes", "expected"), [(0, 0), (1, 1), (24, 1), (25, 2), (72, 3)])
def test_state_has_pieces_of_a_block(state_bytes, expected):
    assert count_pieces(state_bytes, BLOCK_BYTES) == expected


def test_model_without_states_has_no_pieces():
    assert count_pieces(0, 0) == 0


def test_keys_of_pieces_differ():
    keys = [key for block in KEYS for key in keys_of_state(block, NUM_PIECES)]
    assert len({*keys, *KEYS}) == len(KEYS) * (1 + NUM_PIECES)
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("num_tokens", "first", "expected"),
    [(33, 0, 6), (25, 0, 6), (24, 0, 3), (13, 0, 3), (12, 0, 0), (33, 3, 3), (33, 6, 0), (3, 0, 0)],
)
def test_last_state_before_the_last_token_is_found(num_tokens, first, expected):
    assert find(Asked(states=[2, 5]), num_tokens, first).num_usable == expected


def test_state_after_missing_block_is_not_found():
    assert find(Asked(states=[2, 5]), is_whole=[True] * 5).num_usable == 3
    assert find(Asked(states=[2, 5]), is_whole=[]).num_usable == 0


def test_state_without_a_piece_is_not_found():
    store = Asked(states=[2, 5])
    store.forget(keys_of_state(KEYS[5], NUM_PIECES)[2:])
    assert find(store) == (3, NUM_PIECES)
    assert find(store, most_lookups=3) == (0, 2), "the pieces of the last state that was looked up"


def test_number_of_lookups_is_bounded():
    store = Asked(states=[2])
    assert find(store, most_lookups=5).num_usable == 0
    assert store.asked == [keys_of_state(KEYS[number], NUM_PIECES) for number in (7, 6, 5, 4, 3)]
    assert find(store, most_lookups=6).num_usable == 3


def test_state_needs_window_parts_of_next_row():
    whole = [True, True, True, True, False, True, True, True]
    assert find(Asked(states=[3, 5, 6]), is_whole=whole, kinds=[SlidingWindow(9)]).num_usable == 7
    assert find(Asked(states=[3, 5]), is_whole=whole, kinds=[SlidingWindow(9)]).num_usable == 4


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Lookups:
    """A connector whose lookups run when they are awaited."""

    def __init__(self, store):
        self.store = store
        self.connector = StoreConnector(store, SIZE, num_state_pieces=NUM_PIECES)
        self.connector.close()
        self.left = []
        self.connector._threads = SimpleNamespace(submit=self.left.append)

    def ask(self, num_tokens=33, *, expects_kv=False):
        request = SimpleNamespace(
            request_id="r", num_tokens=num_tokens, num_prompt_tokens=num_tokens, expects_kv=expects_kv,
            block_hashes=KEYS[: num_tokens // SIZE],
        )  # fmt: skip
        self.connector.get_num_new_matched_tokens(request, 0)
        while self.left:
            self.left.pop()()
        return self.connector.get_num_new_matched_tokens(request, 0)


def test_lookup_ends_at_last_state():
    assert Lookups(Asked(6, states=[2, 4])).ask() == 5 * SIZE
    assert Lookups(Asked(6)).ask() == 0


@pytest.mark.parametrize("num_tokens", [33, 32])
def test_expected_state_is_awaited(clock, num_tokens):
    """It follows the last full block that leaves a token to compute, and its save ends after the blocks' saves."""
    last = (num_tokens - 1) // SIZE
    store = Asked(0, states=[1])
    lookups = Lookups(store)
    assert lookups.ask(num_tokens, expects_kv=True) is None
    for number in range(8):
        clock.now += 0.9
        store.put(KEYS[: number + 1])
        assert lookups.ask(num_tokens, expects_kv=True) is None
    for key in keys_of_state(KEYS[last - 1], NUM_PIECES):
        clock.now += 0.9
        store.put([key])
        result = lookups.ask(num_tokens, expects_kv=True)
    assert result == last * SIZE


def test_earlier_state_is_used_if_expected_state_does_not_arrive(clock):
    store = Asked(8, states=[1])
    lookups = Lookups(store)
    assert lookups.ask(expects_kv=True) is None
    assert store.asked[1:] == [keys_of_state(KEYS[7], NUM_PIECES)], "no earlier state is looked up while it waits"
    clock.now += 0.99
    assert lookups.ask(expects_kv=True) is None
    clock.now += 0.02
    assert lookups.ask(expects_kv=True) == 2 * SIZE


def test_wait_that_ends_during_a_lookup_is_followed_by_another_lookup(clock, monkeypatch):
    store = Asked(8, states=[1])
    lookups = Lookups(store)
    assert lookups.ask(expects_kv=True) is None
    look_up = store.num_matched
    monkeypatch.setattr(store, "num_matched", lambda *args: (setattr(clock, "now", 102.0), look_up(*args))[1])
    clock.now += 0.99
    assert lookups.ask(expects_kv=True) is None
    clock.now += 1.0
    assert lookups.ask(expects_kv=True) == 2 * SIZE


def test_states_that_any_piece_lacks_are_saved():
    store = Asked(states=[2, 5])
    store.forget(keys_of_state(KEYS[5], NUM_PIECES)[1:2])
    lookups = Lookups(store)
    assert lookups.connector.states_to_save([KEYS[2], KEYS[5], KEYS[6]]) == {KEYS[5], KEYS[6]}
