"""The checks that judge a mutant: the tests of its room, and worlds of the simulation for the core.

pytest collects the tests once, in this process. To judge a mutant, a process forks, changes the function, and runs the
checks that reach the changed line: nothing is imported again.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import CodeType, FrameType

    from simulation.world import WorldConfig

    from mutation.mutator import Module

WORLD_STEPS = 60
_OPTIONS = (
    *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-s", "-o", "addopts="),
    *("-W", "ignore::pytest.PytestConfigWarning"),  # pyproject.toml has options of faulthandler
)
_FAST = "not slow and not performance and not real"
_WHOLE_SWEEPS = (
    "(sweep or not(slow)) and not performance and not real"  # with "not slow", tests/conftest.py omits cases
)


@dataclass(frozen=True, slots=True)
class Check:
    """A test or a world. passes: runs it in this process."""

    name: str
    passes: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Reach:
    """The lines of the unchanged code that a check executed, by module.

    seconds: its processor time; wall_s: the time until it ended.
    """

    seconds: float
    wall_s: float
    lines: dict[str, set[int]]


@dataclass(frozen=True, slots=True)
class Judges:
    """The tests and worlds that judge.

    paths: files and folders of tests. left_out: prefixes of the names of tests that do not judge. conftest: the folder
    above which no conftest.py is loaded. whole_sweeps: cases of sweeps that are not drawn judge too.
    """

    paths: tuple[str, ...]
    conftest: Path
    left_out: tuple[str, ...] = ()
    num_worlds: int = 0
    whole_sweeps: bool = False

    def collect(self, use: Callable[[list[Check]], None]) -> bool:
        """Import the tests, and call `use` with them and the worlds; return False if they cannot be imported.

        Hypothesis draws the same examples each time, so that a check reaches the lines that were measured.
        """
        settings.register_profile("mutants", derandomize=True, database=None)
        settings.load_profile("mutants")
        options = [
            *_OPTIONS,
            f"--confcutdir={self.conftest}",
            *("-m", _WHOLE_SWEEPS if self.whole_sweeps else _FAST),
            *(f"--deselect={prefix}" for prefix in self.left_out),
            *self.paths,
        ]
        return pytest.main(options, plugins=[_Session(use, self.num_worlds)]) == pytest.ExitCode.OK


class _Session:
    """A pytest plugin that returns the collected tests instead of running them."""

    def __init__(self, use: Callable[[list[Check]], None], num_worlds: int) -> None:
        self._use = use
        self._num_worlds = num_worlds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Return tests and worlds; none if a test file cannot be imported."""
        if session.testsfailed:
            return True
        tests = [Check(item.nodeid, lambda item=item: _passes(item)) for item in session.items]
        self._use([*tests, *_worlds(self._num_worlds)])
        return True


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _worlds(count: int) -> list[Check]:
    if not count:
        return []
    from simulation.world import draw_config, draw_recurrent, draw_stored_states, draw_windowed, run_world

    def passes(name: str, draw: Callable[[random.Random, int], WorldConfig]) -> bool:
        try:
            run_world(name, draw(random.Random(name), WORLD_STEPS))
        except Exception:  # noqa: BLE001  whatever it raises, it does not pass
            return False
        return True

    draws = draw_config, draw_windowed, draw_recurrent, draw_stored_states
    worlds = [(f"world {index}", draws[index % 4]) for index in range(count)]
    return [Check(name, lambda name=name, draw=draw: passes(name, draw)) for name, draw in worlds]


class Trace:
    """Records the executed lines of functions of some modules, in all threads.

    lines: by the name of the module.
    """

    def __init__(self, modules: list[Module]) -> None:
        self._names = {str(module.path): module.name for module in modules}
        self.lines: dict[str, set[int]] = {module.name: set() for module in modules}
        self._watches: dict[CodeType, Any] = {}

    def start(self) -> None:
        """Begin."""
        threading.settrace(self._watch)
        sys.settrace(self._watch)

    def stop(self) -> None:
        """End."""
        sys.settrace(None)
        threading.settrace(None)

    def _watch(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        if code not in self._watches:
            name = self._names.get(code.co_filename)
            is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or class
            self._watches[code] = _noting(code, self.lines[name]) if name and is_function else None
        return self._watches[code]


def reach_of(check: Check, modules: list[Module]) -> Reach | None:
    """Run a check on the unchanged code; return None if it fails."""
    trace = Trace(modules)
    start, start_wall = time.process_time(), time.monotonic()
    trace.start()
    try:
        is_good = check.passes()
    finally:
        trace.stop()
    return Reach(time.process_time() - start, time.monotonic() - start_wall, trace.lines) if is_good else None


def _noting(code: CodeType, lines: set[int]) -> Any:
    """Record the executed lines of a function until all have been executed."""
    rest = {line for _, _, line in code.co_lines() if line is not None}

    def note(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            lines.add(frame.f_lineno)
            rest.discard(frame.f_lineno)
        return note if rest else None

    return note
