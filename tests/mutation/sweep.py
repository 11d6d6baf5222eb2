"""Judges mutants, each in a forked process of its own, under limits of time and memory."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mutation.checks import Check, Judges, Reach, Trace, reach_of
from mutation.children import IDLENESS, in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mutation.mutator import Module, Mutant

IMPORT_S = 20.0  # of one core
MAX_FAILED_SHARE = 0.02
MOST_S = 20.0  # measured time of the checks that a mutant survives before it counts as alive


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a mutant. killed_by: the check that failed, or how its process ended; None if it survives."""

    mutant: Mutant
    killed_by: str | None
    num_checks: int


class Sweep:
    """Judges mutants of `modules` with `jobs` processes.

    tell: called with each verdict as it arrives. limit_s: no mutant is started after so many seconds, not counting the
    measurement of the checks.
    """

    def __init__(
        self,
        modules: list[Module],
        judges: Judges,
        *,
        jobs: int = 1,
        tell: Callable[[Verdict], None] = lambda _verdict: None,
        limit_s: float = float("inf"),
    ) -> None:
        self._modules = modules
        self._judges = judges
        self._jobs = jobs
        self._tell = tell
        self._limit_s = limit_s
        self._reach: dict[str, Reach] = {}
        self._at_import: dict[str, set[int]] = {}  # lines of functions, by module
        self._kills: Counter[tuple[str, str, str]] = Counter()  # by module, function and check

    def judge(self, mutants: Sequence[Mutant]) -> list[Verdict]:
        """Judge mutants: first those that must be imported, then those of functions.

        Under a time limit, the time for imports is proportional to their share of the mutants.
        """
        verdicts: list[Verdict] = []
        libraries = self._measure()
        imported = [mutant for mutant in mutants if self._needs_import(mutant)]
        patched = [mutant for mutant in mutants if not self._needs_import(mutant)]
        start = time.monotonic()

        def judge_functions(checks: list[Check]) -> None:
            verdicts.extend(self._judged(patched, lambda mutant: self._try_patched(mutant, checks), end))

        if imported:
            _import_all(libraries)
            end = start + self._limit_s * len(imported) / len(mutants)
            verdicts += self._judged(imported, self._try_imported, end)
        end = start + self._limit_s
        if not self._judges.collect(judge_functions):
            raise RuntimeError("the sweep broke off")
        return verdicts

    def _measure(self) -> list[str]:
        """Run every check on the unchanged code, in processes that import octavo; this process must not import it.

        Return the modules of other packages that the checks import.
        """

        def measure(first: int) -> object:
            found: list[object] = []
            failed: list[str] = []
            at_import = Trace(self._modules)

            def run(checks: list[Check]) -> None:
                at_import.stop()
                for check in checks[first :: self._jobs]:
                    reach = reach_of(check, self._modules)
                    if reach is None:
                        failed.append(check.name)
                    else:
                        lines = [*map(sorted, reach.lines.values())]
                        found.append((check.name, reach.seconds, reach.wall_s, lines))

            at_import.start()
            if not self._judges.collect(run):
                raise RuntimeError("the tests cannot be collected")
            return found, failed, _libraries(), [*map(sorted, at_import.lines.values())]

        names = [module.name for module in self._modules]
        libraries: list[str] = []
        failed: list[str] = []
        for _, said in in_children(range(self._jobs), self._jobs, measure):
            found, more, *rest = json.loads(said)
            if not rest:
                raise RuntimeError(f"the tests ended with {found} without any mutant")
            libraries, imports = rest
            failed += more
            self._at_import = dict(zip(names, map(set, imports), strict=True))
            for name, seconds, wall_s, lines in found:
                self._reach[name] = Reach(seconds, wall_s, dict(zip(names, map(set, lines), strict=True)))
        self._tell_failed(failed)
        return libraries

    def _tell_failed(self, failed: list[str]) -> None:
        """Exclude tests that fail on the unchanged code: under tracing, a test of times may fail. Many of them are an
        error.
        """
        for name in failed:
            print(f"{name} fails without any mutant: it does not judge", flush=True)
        if len(failed) > MAX_FAILED_SHARE * (len(failed) + len(self._reach)):
            raise RuntimeError(f"{len(failed)} tests fail without any mutant: {', '.join(failed)}")

    def _needs_import(self, mutant: Mutant) -> bool:
        """Return True if a mutant is visible only when its module is imported, so that patching its function is too
        late.
        """
        name = mutant.module.name
        return not mutant.function or (
            not self._at_import[name].isdisjoint(mutant.lines)
            and all(reach.lines[name].isdisjoint(mutant.lines) for reach in self._reach.values())
        )

    def _judged(self, mutants: list[Mutant], act: Callable[[Mutant], object], end: float) -> Iterator[Verdict]:
        """Judge mutants until a time of the monotonic clock."""
        for mutant, said in in_children((each for each in mutants if time.monotonic() < end), self._jobs, act):
            verdict = Verdict(mutant, *json.loads(said))
            self._kills[mutant.module.name, mutant.function, verdict.killed_by or ""] += 1
            self._tell(verdict)
            yield verdict

    def _try_patched(self, mutant: Mutant, checks: list[Check]) -> object:
        try:
            mutant.patch()
        except SyntaxError:  # for example a name that an inner function binds by nonlocal is gone
            return "compilation", 0
        return self._try(mutant, checks)

    def _try_imported(self, mutant: Mutant) -> object:
        sys.meta_path.insert(0, _MutantFinder(mutant))
        signal.setitimer(signal.ITIMER_VIRTUAL, IMPORT_S)
        answers: list[object] = []
        self._judges.collect(lambda checks: answers.append(self._try(mutant, checks)))
        return answers[0] if answers else ("import", 0)

    def _try(self, mutant: Mutant, checks: list[Check]) -> tuple[str | None, int]:
        """Run the checks that reach a mutant until one fails, starting with those that killed mutants of the same
        function.

        Code that runs at import is reached by all checks; those that execute functions of its module come first,
        ordered by time. Checks after a total of MOST_S seconds are not run.
        """
        name, kills, reach = mutant.module.name, self._kills, self._reach
        reached = [check for check in checks if self._reaches(check, mutant)]
        reached.sort(
            key=lambda check: (
                -kills[name, mutant.function, check.name],
                not reach[check.name].lines[name],
                reach[check.name].wall_s,
            )
        )
        passed_s = 0.0
        for check in reached:
            if passed_s > MOST_S:
                break
            passed_s += reach[check.name].wall_s
            signal.setitimer(signal.ITIMER_VIRTUAL, 1 + 10 * reach[check.name].seconds)
            IDLENESS.allow(2 + 3 * reach[check.name].wall_s, 10 + 10 * reach[check.name].wall_s)
            if not check.passes():
                return check.name, len(reached)
        return None, len(reached)

    def _reaches(self, check: Check, mutant: Mutant) -> bool:
        reach = self._reach.get(check.name)  # None for a check that was not measured
        return reach is not None and (
            self._needs_import(mutant) or not reach.lines[mutant.module.name].isdisjoint(mutant.lines)
        )


class _MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> Any:
        if fullname != self._mutant.module.name:
            return None
        path = self._mutant.module.path
        is_package = path.name == "__init__.py"
        places = [str(path.parent)] if is_package else None
        return importlib.util.spec_from_file_location(fullname, path, loader=self, submodule_search_locations=places)

    def get_source(self, _fullname: str) -> str:
        return self._mutant.module.path.read_text()

    def get_code(self, _fullname: str) -> Any:
        return self._mutant.compiled()


def _libraries() -> list[str]:
    """Return the modules of installed packages that this process has imported, in the order of their import."""
    return [
        name
        for name, module in sys.modules.items()
        if "site-packages" in (getattr(module, "__file__", None) or "") and name.partition(".")[0] != "octavo"
    ]


def _import_all(names: list[str]) -> None:
    """Import modules of other packages once, so that processes that import a mutant need not."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
