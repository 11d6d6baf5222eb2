"""Parts of the slow tests: each test is in exactly one, and a time limit skips different tests each time."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from parts import TimeLimit, in_order_of, is_in_part, read_part

NAMES = [f"tests/test_{file}.py::test_{number}" for file in "abcdefgh" for number in range(20)]


def test_every_slow_test_is_in_exactly_one_part():
    assert {sum(is_in_part(name, index, 8) for index in range(8)) for name in NAMES} == {1}
    assert all(sum(is_in_part(name, index, 8) for name in NAMES) > 5 for index in range(8))


def test_seed_changes_file_order_and_keeps_files_together():
    items = [SimpleNamespace(nodeid=name) for name in NAMES]
    first, second = ([item.nodeid for item in in_order_of(items, seed)] for seed in ("2026-1", "2026-2"))
    assert first != second
    assert first == [item.nodeid for item in in_order_of(items, "2026-1")]
    assert sorted(first) == sorted(NAMES)
    files = [name.partition("::")[0] for name in first]
    assert sum(a != b for a, b in pairwise(files)) == 7


@pytest.mark.parametrize("text", ["8/8", "3", "a/8", "-1/8", "1/", ""])
def test_invalid_part_is_refused(text):
    with pytest.raises(ValueError, match="INDEX/NUMBER"):
        read_part(text)


def test_time_limit_passes_after_its_seconds():
    now = [100.0]
    limit = TimeLimit(5.0, lambda: now[0])
    now[0] = 105.0
    assert not limit.has_passed
    now[0] = 105.1
    assert limit.has_passed
    assert read_part("7/8") == (7, 8)
