"""The history of evicted blocks: its content and its limits."""

from __future__ import annotations

import pytest

from octavo.core.kv.cache_history import CacheHistory, Miss, MissReason
from octavo.core.kv.manager import KVCacheManager

ROOT = (1, 2, 3)


@pytest.fixture
def history():
    history = CacheHistory(10)
    history.add(0, ROOT, b"root", None, ("salt:a",))
    history.add(1, (4, 5, 6), b"child", b"root", ("salt:a",))
    return history


@pytest.mark.parametrize(
    ("index", "tokens", "name", "parent", "keys", "expected"),
    [
        (0, ROOT, b"root", None, ("salt:a",), Miss(MissReason.EVICTED)),
        (0, ROOT, b"root of b", None, ("salt:b",), Miss(MissReason.OTHER_SALT)),
        (1, ROOT, b"elsewhere", None, ("salt:b",), Miss(MissReason.EVICTED)),  # it is the first child of its parent
        (0, (1, 2, 9), b"other", None, ("salt:a",), Miss(MissReason.DIFFERENT_TOKEN, 2)),
        (0, (1, 9, 3), b"other", None, ("salt:a",), Miss(MissReason.DIFFERENT_TOKEN, 1)),
        (0, (9, 2, 3), b"other", None, ("salt:a",), Miss(MissReason.NEVER_SEEN)),
        (1, (4, 5, 9), b"other", b"root", ("salt:a",), Miss(MissReason.DIFFERENT_TOKEN, 5)),
        (1, (4, 5, 6), b"other", b"unknown", ("salt:a",), Miss(MissReason.NEVER_SEEN)),
    ],
)
def test_why_missed_returns_miss_reason_and_position(history, index, tokens, name, parent, keys, expected):
    assert history.why_missed(index, tokens, name, parent, keys) == expected


def test_history_forgets_oldest_block_first_and_renews_repeated_block():
    history = CacheHistory(2)
    for token in (1, 2, 1, 3):
        history.add(token, (token,), b"%d" % token, b"%d" % token, ("a",))
    for token, expected in ((1, "other salt"), (2, "never seen"), (3, "other salt")):
        assert history.why_missed(token, (token,), b"other", None, ("b",)).reason == expected
        assert (history.why_missed(9, (9,), b"%d" % token, None, ()).reason == "evicted") == (token != 2)
        assert (history.why_missed(9, (token,), b"other", b"%d" % token, ()).reason == "evicted") == (token != 2)


@pytest.mark.parametrize(("num_blocks", "expected"), [(10, 1024), (300, 1200), (1 << 15, 1 << 16)])
def test_history_capacity_is_bounded_for_large_cache(num_blocks, expected):
    history = KVCacheManager(num_blocks, 4).prefix_cache.history
    for number in range(expected + 1):
        history.add(number, (number,), b"%d" % number, None, ())
    assert history.why_missed(0, (0,), b"0", b"?", ()) != Miss(MissReason.EVICTED)
    assert history.why_missed(1, (1,), b"1", b"?", ()) == Miss(MissReason.EVICTED)
