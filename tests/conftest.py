"""Makes `fakes` importable from every test, draws a part of sweeps and of slow tests, and reports skipped tests.

A test function marked `sweep(n)` has many similar cases. One in n of them runs, and the rest are `slow`. One marked
`turn(n)` is expensive and runs in one of n runs; in the others it is `slow`. OCTAVO_SWEEP_SEED draws; by default it is
the date and the commit.
"""

from __future__ import annotations

import datetime as dt
import gc
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; 0 tests its kernels on a GPU

import certifi
import pytest
from _pytest.runner import runtestprotocol
from kernels_available import COMPILED
from parts import TimeLimit, in_order_of, is_in_part, read_part
from skips import count_reasons, fail_if_unexpected
from sweeps import commit_suffix, is_its_turn, left_out

from octavo.config import isa_from_environment, kernels_required

if TYPE_CHECKING:
    from collections.abc import Generator

SWEEP_SEED = "OCTAVO_SWEEP_SEED"


LIMIT = pytest.StashKey[TimeLimit]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo")
    group.addoption("--part", metavar="K/N", help="run only the tests of part K of N, files in an order by the seed")
    group.addoption(
        "--limit-s", type=float, metavar="S", help="skip tests that have not begun S seconds after collection"
    )
    group.addoption("--strict-skips", action="store_true", help="fail if a test is skipped for an unlisted reason")


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up: no use of the user's cache directory, one seed, no garbage collection during collection.

    Without a compiler octavo warns that it uses plain torch; every other warning stays an error. The processes of
    pytest-xdist inherit the seed. Garbage collection during test collection took each process 2.5 of 19 s.
    """
    gc.disable()
    share_logging()
    folder = tempfile.TemporaryDirectory(prefix="octavo-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    os.environ["SSL_CERT_FILE"] = str(one_certificate(Path(folder.name)))
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault(SWEEP_SEED, dt.datetime.now(tz=dt.UTC).strftime("%Y-%j") + commit_suffix())
    if not COMPILED and not kernels_required():
        config.addinivalue_line(
            "filterwarnings", "ignore:octavo was installed without its compiled kernels:RuntimeWarning"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that the command line requests."""
    if config.option.part is None:
        return
    try:
        index, number = read_part(config.option.part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    kept = [item for item in items if is_in_part(item.nodeid, index, number)]
    config.hook.pytest_deselected(items=[item for item in items if not is_in_part(item.nodeid, index, number)])
    items[:] = in_order_of(kept, os.environ[SWEEP_SEED])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that begins after the time limit of the run."""
    limit = item.config.stash.get(LIMIT, None)
    if limit is not None and limit.has_passed:
        pytest.skip(f"the limit of {limit.limit_s:.0f} s for this run has passed")


def share_logging() -> None:
    """Send torch's logs to the root logger: pytest otherwise adds and removes handlers of 42 loggers, six times a
    test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def one_certificate(folder: Path) -> Path:
    """Write a file with the one authority that clients trust by default; return its path. Reading all takes a client 40
    ms.
    """
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    path = folder / "authority.pem"
    path.write_text(first[first.index("-----BEGIN CERTIFICATE-----") :] + end, encoding="utf-8")
    return path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude tests and libraries from garbage collection, which took half a second. Begin the time limit of the run:
    slow collection must not skip every test.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if (limit_s := session.config.option.limit_s) is not None:
        session.config.stash[LIMIT] = TimeLimit(limit_s, time.monotonic)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report a passing test with one message instead of five: they cost pytest-xdist processes more than most tests.

    With `--durations` all are sent. pytest-xdist knows the test of a crashed process without them.
    """
    if not hasattr(item.config, "workerinput") or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped and, if one failed, the seed that repeats the draw."""
    for reason, count in count_reasons(terminalreporter.stats.get("skipped", ())).most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"cases of sweeps were drawn by {SWEEP_SEED}={os.environ[SWEEP_SEED]}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --strict-skips, fail the run if a test was skipped for a reason that `skips` does not list."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and session.config.option.strict_skips:
        fail_if_unexpected(session, reporter)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Remove, or mark as slow, the tests and the cases of a sweep that are not drawn."""
    made = yield
    if isinstance(made, list):
        made = [item for item in made if of_forced_instruction_set(item)]
    if not isinstance(made, list) or not made:
        return made
    undrawn = set(not_drawn(made))
    if takes_no_slow_ones(collector.config):
        return [item for item in made if item not in undrawn]
    for item in undrawn:
        item.add_marker(pytest.mark.slow)
    return made


def not_drawn(made: list[Any]) -> list[pytest.Item]:
    """Return the cases of one test function that do not run.

    A forced instruction set halves the share that runs, because other cases run in the same landing with the best one.
    """
    fewer = 1 if isa_from_environment() is None else 2
    cases = [item for item in made if isinstance(item, pytest.Item)]
    if not cases:
        return []
    seed = f"{os.environ[SWEEP_SEED]} {cases[0].nodeid.partition('[')[0]}"
    turn, sweep = (cases[0].get_closest_marker(name) for name in ("turn", "sweep"))
    if turn and not is_its_turn(fewer * turn.args[0], seed):
        return cases
    swept = [item for item in cases if item.get_closest_marker("sweep")]
    return left_out(swept, fewer * sweep.args[0], seed) if sweep else []


def of_forced_instruction_set(item: pytest.Item) -> bool:
    """Return whether a case that names an instruction set names the one that `make test-isa` forces.

    Cases of other instruction sets run in other runs of that target.
    """
    forced = isa_from_environment()
    return (
        forced is None or getattr(item, "callspec", None) is None or item.callspec.params.get("isa", forced) == forced
    )


def takes_no_slow_ones(config: pytest.Config) -> bool:
    """Return True if slow cases need not be made: the command line names no case, and has the markers of
    pyproject.toml.
    """
    return "not slow" in config.option.markexpr and not any("::" in word for word in config.args)
