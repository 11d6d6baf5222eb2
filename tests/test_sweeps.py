"""A part of a sweep's cases runs each day, and every case runs on some day."""

from __future__ import annotations

import pytest
from sweeps import left_out

CASES = list(range(10))


@pytest.mark.parametrize(("one_in", "num_run"), [(1, 10), (3, 4), (4, 3), (10, 1), (50, 1)])
def test_sweep_runs_one_case_of_each_group(one_in, num_run):
    run = [case for case in CASES if case not in left_out(CASES, one_in, "seed")]
    assert [case // one_in for case in run] == list(range(num_run))
    assert left_out(CASES, one_in, "seed") == left_out(CASES, one_in, "seed")


def test_every_sweep_case_runs_on_some_day():
    assert {case for day in range(60) for case in CASES if case not in left_out(CASES, 4, f"2026-{day}")} == {*CASES}
