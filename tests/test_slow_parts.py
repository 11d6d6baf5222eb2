"""Parts of the slow tests: each test is in exactly one, a time limit skips different tests each time, a hang fails."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import TimeLimit, in_order_of, is_in_part, read_part

ROOT = Path(__file__).parents[1]
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


def run_pytest(folder, code, *options):
    """Run a test file as a process of pytest-xdist with the project's settings; return the finished process."""
    file = folder / "test_written.py"
    file.write_text(code)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-n",
        "1",
        "-p",
        "conftest",
        *options,
        file,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_hanging_test_fails_and_stacks_are_printed(tmp_path):
    code = "import threading\ndef test_hangs():\n    threading.Event().wait(100)\n"
    done = run_pytest(tmp_path, code, "-o", "faulthandler_timeout=1", "--max-worker-restart", "0")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "crashed while running" in done.stdout
    assert "in test_hangs" in done.stderr


@pytest.mark.slow
def test_time_limit_begins_after_collection(tmp_path):
    code = "import time\ntime.sleep(1.5)\ndef test_first():\n    time.sleep(1.5)\ndef test_second():\n    pass\n"
    done = run_pytest(tmp_path, code, "--limit-s", "1")
    assert "1 passed, 1 skipped" in done.stdout


def test_every_test_has_limit_for_hangs(pytestconfig):
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
