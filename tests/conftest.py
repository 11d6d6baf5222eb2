"""Makes `fakes` importable from every test: pytest puts this file's directory on the path. Draws a part of sweeps.

A test function marked `sweep(n)` has many cases that are alike: one in n runs, another the next day, and the others are
`slow`. OCTAVO_SWEEP_SEED draws which; where it is not set, the date does.
"""

from __future__ import annotations

import datetime as dt
import gc
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; 0 tests its kernels on a GPU

import certifi
import pytest
from _pytest.runner import runtestprotocol
from kernels_available import COMPILED
from sweeps import left_out

from octavo.config import isa_from_environment, kernels_required

if TYPE_CHECKING:
    from collections.abc import Generator

SWEEP_SEED = "OCTAVO_SWEEP_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache directory out of it; and where no compiler is at hand octavo warns that plain torch serves.

    Every other warning stays an error. The seed is set once: the processes of pytest-xdist inherit it. Garbage is not
    looked for until all tests are collected, which stay: that took each process 2.5 of 19 s.
    """
    gc.disable()
    share_logging()
    folder = tempfile.TemporaryDirectory(prefix="octavo-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    os.environ["SSL_CERT_FILE"] = str(one_certificate(Path(folder.name)))
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault(SWEEP_SEED, dt.datetime.now(tz=dt.UTC).strftime("%Y-%j"))
    if not COMPILED and not kernels_required():
        config.addinivalue_line(
            "filterwarnings", "ignore:octavo was installed without its compiled kernels:RuntimeWarning"
        )


def share_logging() -> None:
    """Let what torch logs reach the root: pytest else adds and removes its handlers at 42 loggers, six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def one_certificate(folder: Path) -> Path:
    """Whom clients trust that name nobody: one authority of all. Each client reads the file, which takes 40 ms else."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    path = folder / "authority.pem"
    path.write_text(first[first.index("-----BEGIN CERTIFICATE-----") :] + end, encoding="utf-8")
    return path


def pytest_collection_finish() -> None:
    """Spare the garbage collector thousands of tests, and all the libraries: a full collection took half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tell of a test that passes by one message, not by five: they cost processes of pytest-xdist more than most tests.

    With `--durations` all are sent. Which test a process that crashes was in pytest-xdist knows without them.
    """
    if not hasattr(item.config, "workerinput") or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"cases of sweeps were drawn by {SWEEP_SEED}={os.environ[SWEEP_SEED]}")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Leave out, or mark as slow, what the draw does not give of a sweep."""
    made = yield
    if isinstance(made, list):
        made = [item for item in made if of_forced_instruction_set(item)]
    cases = [item for item in made if item.get_closest_marker("sweep")] if isinstance(made, list) else []
    if not cases:
        return made
    (one_in,) = cases[0].get_closest_marker("sweep").args
    undrawn = set(left_out(cases, one_in, f"{os.environ[SWEEP_SEED]} {cases[0].nodeid.partition('[')[0]}"))
    if takes_no_slow_ones(collector.config):
        return [item for item in made if item not in undrawn]
    for item in undrawn:
        item.add_marker(pytest.mark.slow)
    return made


def of_forced_instruction_set(item: pytest.Item) -> bool:
    """Return whether a case that names an instruction set names the one that `make test-isa` forces.

    The others are the subject of that target's other runs.
    """
    forced = isa_from_environment()
    return forced is None or getattr(item, "callspec", None) is None or item.callspec.params.get("isa", forced) == forced


def takes_no_slow_ones(config: pytest.Config) -> bool:
    """Whether cases that are slow need not be made: nobody names one, and the markers are those of pyproject.toml."""
    return "not slow" in config.option.markexpr and not any("::" in word for word in config.args)
