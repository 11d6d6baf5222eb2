"""Judge mutants of the core and print those that live, then a table.

Exit 1 when one lives that is not listed in equivalent.toml, or when an entry there is no mutant or is seen by a test.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from mutation.mutator import modules_of
from mutation.selection import EQUIVALENT, diff_since, key_of, of_changed_lines, read_equivalent
from mutation.sweep import Sweep, Verdict

if TYPE_CHECKING:
    from mutation.mutator import Mutant
    from mutation.selection import Key

PACKAGE = "octavo.core"


def main() -> int:
    """Read the command line, choose and judge."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of the core, all of them by default")
    parser.add_argument("--changed", metavar="REV", help="only statements changed since the branch left REV")
    parser.add_argument("--share", type=float, default=1.0, help="judge this share of them, drawn by chance")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="judge none after so many seconds")
    parser.add_argument(
        "--min-killed", type=float, default=100, help="fail below this percentage (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    modules = modules_of(PACKAGE)
    mutants = [mutant for module in modules for mutant in module.mutants()]
    known = read_equivalent(EQUIVALENT.read_text())
    report = Report(known)
    report.tell_stale({key_of(mutant) for mutant in mutants})
    chosen = chosen_of(mutants, args)
    if not chosen:
        print("no statement of the core changed: nothing to judge")
        return report.exit_code
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    start = time.monotonic()
    Sweep(modules, jobs=args.jobs, tell=report.add, may_go_on=TimeLimit(args.limit_s)).judge(chosen)
    report.print_table(len(chosen), time.monotonic() - start, args.min_killed)
    return report.exit_code


def chosen_of(mutants: list[Mutant], args: argparse.Namespace) -> list[Mutant]:
    """Return those that the command line asks for."""
    names = {name.removeprefix("core/") for name in args.files} or {each.module.path.name for each in mutants}
    if missing := names - {each.module.path.name for each in mutants}:
        raise SystemExit(f"the core has no {', '.join(sorted(missing))} with anything to change")
    chosen = [each for each in mutants if each.module.path.name in names]
    if args.changed:
        diff = diff_since(args.changed, PACKAGE)
        if diff is None:
            print(f"git does not know {args.changed}, or no commit before it: any statement may have changed")
        else:
            chosen = of_changed_lines(chosen, diff)
    if args.share < 1 or args.limit_s < float("inf"):
        chosen = random.Random(args.seed).sample(chosen, round(len(chosen) * args.share))
    return chosen


class TimeLimit:
    """Whether there is time for one more. It begins with the first, behind the measuring of all checks."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, float("inf")

    def __call__(self) -> bool:
        now = time.monotonic()
        self._end = min(self._end, now + self._seconds)
        return now < self._end


class Report:
    """Prints what matters as it comes, and counts."""

    def __init__(self, known: dict[Key, str]) -> None:
        self._known = known
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen: dict[Key, Verdict] = {}
        self._live: set[Key] = set()
        self.exit_code = 0

    def tell_stale(self, keys: set[Key]) -> None:
        """Tell which entries of the list are no mutants of the code as it is."""
        for file, function, before, after in sorted(self._known.keys() - keys):
            self.exit_code = 1
            print(f"equivalent.toml: no longer a mutant: {file} {function}\n  - {before}\n  + {after}")

    def add(self, verdict: Verdict) -> None:
        """Count, and tell of one that lives."""
        mutant, key = verdict.mutant, key_of(verdict.mutant)
        file = mutant.module.path.name
        if verdict.killed_by is not None:
            self._counts[file, "killed"] += 1
            self._seen.setdefault(key, verdict)
            return
        self._live.add(key)
        self._counts[file, "equivalent" if key in self._known else "alive"] += 1
        if key not in self._known:
            reached = f"{verdict.num_checks} checks reach it" if verdict.num_checks else "not reached"
            print(f"{mutant.title}, {reached}\n  - {mutant.before}\n  + {mutant.after}", flush=True)

    def print_table(self, num_chosen: int, seconds: float, min_killed: float) -> None:
        """Print how many of each file were killed, and which of the equivalent ones a test sees.

        Too few are a failure: less than so many percent of those that make a difference, or none judged at all.
        """
        for key in sorted(self._known.keys() & self._seen.keys() - self._live):
            self.exit_code = 1
            print(f"equivalent.toml: {self._seen[key].killed_by} sees {self._seen[key].mutant.title}\n  + {key[3]}")
        print("| file | mutants | killed | equivalent | alive | killed, % |\n|---|---|---|---|---|---|")
        for file in sorted({file for file, _ in self._counts}):
            print(self._row(file, [self._counts[file, outcome] for outcome in ("killed", "equivalent", "alive")]))
        outcomes = [
            sum(n for (_, o), n in self._counts.items() if o == each) for each in ("killed", "equivalent", "alive")
        ]
        print(self._row("all", outcomes))
        killed, _, alive = outcomes
        if not sum(outcomes) or 100 * killed < min_killed * (killed + alive):
            self.exit_code = 1
        print(f"{sum(outcomes)} of {num_chosen} judged in {seconds:.0f} s")

    @staticmethod
    def _row(file: str, outcomes: list[int]) -> str:
        total = sum(outcomes)
        share = f"{100 * outcomes[0] / total:.1f}" if total else "-"
        return f"| {file} | {total} | {outcomes[0]} | {outcomes[1]} | {outcomes[2]} | {share} |"


if __name__ == "__main__":
    sys.exit(main())
