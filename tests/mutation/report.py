"""The output of a sweep: surviving mutants, and a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mutation.selection import key_of

if TYPE_CHECKING:
    from mutation.selection import Key
    from mutation.sweep import Verdict


class Report:
    """Prints results as they arrive, and counts them.

    known: the equivalent mutants, from the list named `list_name`.
    """

    def __init__(self, known: dict[Key, str], list_name: str) -> None:
        self._known = known
        self._list_name = list_name
        self._counts: Counter[tuple[str, str]] = Counter()
        self._signals: Counter[str] = Counter()
        self._seen: dict[Key, Verdict] = {}
        self._live: set[Key] = set()
        self.exit_code = 0

    def tell_stale(self, keys: set[Key], files: set[str] | None) -> None:
        """Print the entries of the list, of these files or of all, that are not mutants of the present code."""
        for file, function, before, after in sorted(self._known.keys() - keys):
            if files is not None and file not in files:
                continue
            self.exit_code = 1
            print(f"{self._list_name}: no longer a mutant: {file} {function}\n  - {before}\n  + {after}")

    def add(self, verdict: Verdict) -> None:
        """Count a verdict, and print a surviving mutant."""
        mutant, key = verdict.mutant, key_of(verdict.mutant)
        file = mutant.module.file
        if verdict.killed_by is not None:
            self._counts[file, "killed"] += 1
            if verdict.killed_by.startswith("SIG"):
                self._signals[verdict.killed_by] += 1
            self._seen.setdefault(key, verdict)
            return
        self._live.add(key)
        self._counts[file, "equivalent" if key in self._known else "alive"] += 1
        if key not in self._known:
            reached = f"{verdict.num_checks} checks reach it" if verdict.num_checks else "not reached"
            print(f"{mutant.title}, {reached}\n  - {mutant.before}\n  + {mutant.after}", flush=True)

    def print_table(self, num_chosen: int, seconds: float, min_killed: float) -> None:
        """Print the number of killed mutants of each file, and the equivalent ones that fail a test.

        The exit code is 1 if less than `min_killed` percent of the relevant mutants are killed, or if none was judged.
        """
        for key in sorted(self._known.keys() & self._seen.keys() - self._live):
            self.exit_code = 1
            print(f"{self._list_name}: {self._seen[key].killed_by} sees {self._seen[key].mutant.title}\n  + {key[3]}")
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
        limits = "".join(f", {count} of them by {name}" for name, count in sorted(self._signals.items()))
        print(f"{sum(outcomes)} of {num_chosen} judged in {seconds:.0f} s; {killed} killed{limits}")

    @staticmethod
    def _row(file: str, outcomes: list[int]) -> str:
        total = sum(outcomes)
        share = f"{100 * outcomes[0] / total:.1f}" if total else "-"
        return f"| {file} | {total} | {outcomes[0]} | {outcomes[1]} | {outcomes[2]} | {share} |"
