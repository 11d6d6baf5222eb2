"""The sanitizers' tool fails on a report, on results that depend on memory, and on build errors."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import sanitize  # noqa: E402

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("kind", "text", "passes"),
    [
        ("thread", "echo $1 1", True),
        ("thread", "echo 'WARNING: data race' >&2; exit 66", False),
        ("address", "echo AddressSanitizer >&2; exit 1", False),
        ("memory", "echo $1 1", True),
        ("memory", "echo $MALLOC_PERTURB_", False),
        ("memory", "sleep 30", False),
    ],
)
def test_sanitizer_report_or_timeout_fails_run(tmp_path, capsys, kind, text, passes):
    deadline = time.monotonic() + (0.5 if "sleep" in text else 60)
    assert sanitize._run(kind, "portable", program(tmp_path / "p", text), 1, deadline) is passes
    assert ("no report" in capsys.readouterr().out) is passes


def test_every_instruction_set_has_separate_turn():
    there = sanitize._chosen("all", 0)
    assert there[-1] == "portable"
    assert [sanitize._chosen("turn", turn)[0] for turn in range(len(there))] == there
    assert sanitize._chosen("best", 0) == there[:1]
    with pytest.raises(SystemExit, match="this processor has"):
        sanitize._chosen("sve", 0)


@pytest.mark.parametrize("first_day", range(8))
def test_default_turn_reaches_every_instruction_set(monkeypatch, first_day):
    turns = []
    for day in range(20800 + first_day, 20800 + 8 * 12, 8):
        monkeypatch.setattr(time, "time", lambda day=day: day * 86400.0)
        monkeypatch.setattr(sys, "argv", ["sanitize.py"])
        turns.append(sanitize._arguments().turn)
    assert turns == list(range(turns[0], turns[0] + 12))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Give the tool a copy of the sources, and its own build folder."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copy(sanitize.HARNESS, tmp_path / "sanitize.cpp")
    monkeypatch.setattr(sanitize, "BUILD", tmp_path / "build")
    monkeypatch.setattr(sanitize, "HARNESS", tmp_path / "sanitize.cpp")
    monkeypatch.setattr(sanitize, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(sanitize, "COMMON", [*sanitize.COMMON[:-1], str(tmp_path / "csrc")])
    return tmp_path / "csrc"


@needs_compiler
def test_harness_fits_the_kernels():
    """A changed argument of a kernel would otherwise only be noticed on the day of the sanitizers."""
    checked = [*sanitize.COMMON, "-Werror", "-fsyntax-only", str(sanitize.HARNESS)]
    result = subprocess.run(["g++", *checked], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    called = set(re.findall(r"\btable\.(\w+)\(", sanitize.HARNESS.read_text("utf-8")))
    kernels = set(re.findall(r"\bKERNEL\((\w+),", (sanitize.SOURCES / "kernels.h").read_text("utf-8")))
    assert kernels <= called


@needs_compiler
def test_compiler_error_raises_build_error(sources):
    (sources / "thread_pool.cpp").write_text("no C++")
    with pytest.raises(sanitize.BuildError, match="thread_pool"):
        sanitize.Builder("thread", "g++", time.monotonic() + 60).program(sanitize.POOL)


@needs_compiler
@pytest.mark.slow
def test_race_in_thread_pool_is_detected(sources):
    """A caller that does not wait for workers shares its job with them."""

    def passes():
        builder = sanitize.Builder("thread", "g++", time.monotonic() + 300)
        return sanitize._run("thread", sanitize.POOL, builder.program(sanitize.POOL), 20, time.monotonic() + 300)

    assert passes()
    pool = sources / "thread_pool.cpp"
    broken = pool.read_text().replace("inside.load() > 0", "false")
    assert broken != pool.read_text()
    pool.write_text(broken)
    assert not passes()
