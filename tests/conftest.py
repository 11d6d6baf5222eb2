"""Makes `fakes` importable from every test: pytest puts this file's directory on the path. Draws a part of sweeps.

A test function marked `sweep(n)` has many cases that are alike: one in n runs, another the next day, and the others are
`slow`. OCTAVO_SWEEP_SEED draws which; where it is not set, the date does.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import tempfile

import pytest
from kernels_available import COMPILED

from octavo.config import kernels_required

SWEEP_SEED = "OCTAVO_SWEEP_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache directory out of it; and where no compiler is at hand octavo warns that plain torch serves.

    Every other warning stays an error. The seed is set once: the processes of pytest-xdist inherit it.
    """
    folder = tempfile.TemporaryDirectory(prefix="octavo-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault(SWEEP_SEED, dt.datetime.now(tz=dt.UTC).strftime("%Y-%j"))
    if not COMPILED and not kernels_required():
        config.addinivalue_line(
            "filterwarnings", "ignore:octavo was installed without its compiled kernels:RuntimeWarning"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"cases of sweeps were drawn by {SWEEP_SEED}={os.environ[SWEEP_SEED]}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of every n cases that follow one another keep one, drawn at random; before `-m` is applied."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        draw = random.Random(f"{os.environ[SWEEP_SEED]} {name}")
        (one_in,) = cases[0].get_closest_marker("sweep").args
        for first in range(0, len(cases), one_in):
            row = cases[first : first + one_in]
            kept = draw.choice(row)
            for item in row:
                if item is not kept:
                    item.add_marker(pytest.mark.slow)
