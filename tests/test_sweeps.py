"""A part of a sweep's cases and of the expensive tests runs each day, and every one runs on some day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import commit_suffix, is_its_turn, left_out

CASES = list(range(10))
TESTS = Path(__file__).parent
PROJECT = TESTS.parent / "pyproject.toml"


@pytest.mark.parametrize(("one_in", "num_run"), [(1, 10), (3, 4), (4, 3), (10, 1), (50, 1)])
def test_sweep_runs_one_case_of_each_group(one_in, num_run):
    run = [case for case in CASES if case not in left_out(CASES, one_in, "seed")]
    assert [case // one_in for case in run] == list(range(num_run))
    assert left_out(CASES, one_in, "seed") == left_out(CASES, one_in, "seed")


def test_every_sweep_case_runs_on_some_day():
    assert {case for day in range(60) for case in CASES if case not in left_out(CASES, 4, f"2026-{day}")} == {*CASES}


@pytest.mark.parametrize("one_in", [1, 2, 4])
def test_expensive_test_runs_in_about_one_of_n_runs(one_in):
    num_run = sum(is_its_turn(one_in, f"2026-{day} test") for day in range(400))
    assert 0.7 * 400 / one_in <= num_run <= 1.3 * 400 / one_in


def test_expensive_tests_do_not_all_run_on_same_day():
    days = [sum(is_its_turn(3, f"2026-{day} {test}") for test in range(100)) for day in range(30)]
    assert min(days) > 10
    assert max(days) < 60


def test_seed_names_the_commit():
    """So each commit draws other cases."""
    command = ["git", "-C", str(TESTS), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()  # "" if no repository
    suffix = commit_suffix()
    assert bool(suffix) == bool(head)
    assert head.startswith(suffix.removeprefix("-"))


TURNS = """
import pytest

@pytest.mark.turn(3)
def test_expensive(): pass

@pytest.mark.turn(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", range(4))
def test_expensive_sweep(case): pass

def test_cheap(): pass
"""


@pytest.mark.turn(12)
def test_tests_that_are_not_drawn_are_slow(tmp_path):
    (tmp_path / "test_turns.py").write_text(TURNS)
    drawn, slow = (collected(tmp_path, marker) for marker in ("not slow", "slow"))
    assert "test_cheap" in drawn
    assert not drawn & slow
    assert len(drawn | slow) == 6


def collected(folder, marker):
    command = [sys.executable, "-m", "pytest", "-c", str(PROJECT), "--rootdir", str(folder), "--collect-only"]
    command += ["-p", "conftest", "--override-ini", f"pythonpath={TESTS}", "-m", marker, str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OCTAVO_SWEEP_SEED": "a", "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
