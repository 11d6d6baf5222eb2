"""Judges mutants, each in a forked process of its own, under limits of time and memory."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from mutation.checks import TESTS, Check, Reach, reach_of, with_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from mutation.mutator import Module, Mutant

MEMORY_BYTES = 2 << 30
IMPORT_S = 20.0  # of one core


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant. killed_by: the check that saw it, or how its process ended; None where it lives."""

    mutant: Mutant
    killed_by: str | None
    num_checks: int


class Sweep:
    """Judges by the tests in `folder` and `num_worlds` worlds, on `jobs` processes.

    tell: is told of each verdict as it comes; may_go_on: asked before each mutant.
    """

    def __init__(
        self,
        modules: list[Module],
        *,
        folder: Path = TESTS / "core",
        num_worlds: int = 100,
        jobs: int = 1,
        tell: Callable[[Verdict], None] = lambda _verdict: None,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._modules = modules
        self._with_checks = partial(with_checks, folder, num_worlds)
        self._jobs = jobs
        self._tell = tell
        self._may_go_on = may_go_on
        self._reach: dict[str, Reach] = {}
        self._kills: Counter[tuple[str, str]] = Counter()  # by function and check

    def judge(self, mutants: Sequence[Mutant]) -> list[Verdict]:
        """Judge them all: first those that need an import of their own, then those of functions."""
        verdicts: list[Verdict] = []

        def judge_functions(checks: list[Check]) -> None:
            chosen = [mutant for mutant in mutants if mutant.function]
            verdicts.extend(self._judged(chosen, lambda mutant: self._try_patched(mutant, checks)))

        self._reach = self._measured()
        verdicts += self._judged([mutant for mutant in mutants if not mutant.function], self._try_imported)
        if not self._with_checks(judge_functions):
            raise RuntimeError("the sweep broke off")
        return verdicts

    def _measured(self) -> dict[str, Reach]:
        """Run every check over the code as it is, in processes that import the core; this one must not."""

        def measure(first: int) -> object:
            found: list[object] = []

            def run(checks: list[Check]) -> None:
                for check in checks[first :: self._jobs]:
                    reach = reach_of(check, self._modules)
                    found.append((check.name, reach.seconds, [*map(sorted, reach.lines.values())]))

            self._with_checks(run)
            return found

        names = [module.name for module in self._modules]
        return {
            name: Reach(seconds, dict(zip(names, map(set, lines), strict=True)))
            for _, said in _in_children(range(self._jobs), self._jobs, measure)
            for name, seconds, lines in json.loads(said)
        }

    def _judged(self, mutants: list[Mutant], act: Callable[[Mutant], object]) -> Iterator[Verdict]:
        for mutant, said in _in_children((each for each in mutants if self._may_go_on()), self._jobs, act):
            verdict = Verdict(mutant, *json.loads(said))
            self._kills[mutant.function, verdict.killed_by or ""] += 1
            self._tell(verdict)
            yield verdict

    def _try_patched(self, mutant: Mutant, checks: list[Check]) -> object:
        mutant.patch()
        return self._try(mutant, checks)

    def _try_imported(self, mutant: Mutant) -> object:
        sys.meta_path.insert(0, _MutantFinder(mutant))
        signal.setitimer(signal.ITIMER_VIRTUAL, IMPORT_S)
        answers: list[object] = []
        self._with_checks(lambda checks: answers.append(self._try(mutant, checks)))
        return answers[0] if answers else ("import", 0)

    def _try(self, mutant: Mutant, checks: list[Check]) -> tuple[str | None, int]:
        """Run the checks that reach a mutant until one fails: first those that saw others of its function."""
        reached = [check for check in checks if self._reaches(check, mutant)]
        kills, reach = self._kills, self._reach
        reached.sort(key=lambda check: (-kills[mutant.function, check.name], reach[check.name].seconds))
        for check in reached:
            signal.setitimer(signal.ITIMER_VIRTUAL, 1 + 10 * self._reach[check.name].seconds)
            if not check.passes():
                return check.name, len(reached)
        return None, len(reached)

    def _reaches(self, check: Check, mutant: Mutant) -> bool:
        reached = self._reach[check.name].lines[mutant.module.name]
        return not mutant.function or not reached.isdisjoint(mutant.lines)


class _MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports a mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> Any:
        if fullname != self._mutant.module.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.module.path, loader=self)

    def get_source(self, _fullname: str) -> str:
        return self._mutant.module.path.read_text()

    def get_code(self, _fullname: str) -> Any:
        return self._mutant.compiled()


def _in_children(items: Iterable[Any], jobs: int, act: Callable[[Any], object]) -> Iterator[tuple[Any, str]]:
    """Act on each item in a process of its own, `jobs` at a time; yield what each says, as JSON, as they end.

    One that is ended by a signal says so in the place of its answer. Raises RuntimeError for one that fails otherwise.
    """
    running: dict[int, tuple[Any, IO[bytes]]] = {}
    rest = iter(items)
    is_more = True
    while is_more or running:
        while is_more and len(running) < jobs:
            item = next(rest, rest)
            if item is rest:
                is_more = False
                break
            file = tempfile.TemporaryFile()  # noqa: SIM115  closed once it is read
            pid = os.fork()
            if not pid:
                _say(act, item, file)
            running[pid] = item, file
        if not running:
            break
        pid, status = os.wait()
        item, file = running.pop(pid)
        with file:
            file.seek(0)
            said = file.read().decode()
        if os.WIFSIGNALED(status):
            yield item, json.dumps((signal.Signals(os.WTERMSIG(status)).name, 0))
        elif os.WEXITSTATUS(status):
            raise RuntimeError(said)
        else:
            yield item, said


def _say(act: Callable[[Any], object], item: object, file: IO[bytes]) -> None:
    """Answer, and end this process."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    gc.disable()  # it would touch, and so copy, what is shared with the parent
    code = 1
    try:
        said = json.dumps(act(item))
        code = 0
    except BaseException:  # noqa: BLE001  the parent raises it
        said = traceback.format_exc()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    file.write(said.encode())
    file.flush()
    os._exit(code)
