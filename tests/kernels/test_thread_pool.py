"""The C++ thread pool on a system that refuses threads."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.turn(12)
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ and Linux")
def test_thread_pool_retries_refused_threads(tmp_path):
    """A pool that cannot create its threads reports it, runs on one thread, and creates them in the next call."""
    sources = [ROOT / "tests" / "csrc" / "refused_threads.cpp", ROOT / "csrc" / "thread_pool.cpp"]
    program = tmp_path / "refused_threads"
    options = ["-std=c++17", "-O0", "-iquote", str(ROOT / "csrc"), "-o", str(program)]
    subprocess.run(["g++", *options, *map(str, sources), "-lpthread", "-ldl"], check=True, timeout=120)
    ended = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True)
    # The first refusal concerns the first thread, the second one the second thread.
    assert ended.stdout.splitlines() == ["refused 1, 1 asked for", "refused 1, 2 asked for", "set 4, 3 asked for"]
