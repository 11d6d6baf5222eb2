"""The choice of mutants to judge, and the list of equivalent ones."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import defaultdict
from typing import TYPE_CHECKING

from mutation.mutator import SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mutation.mutator import Mutant

Key = tuple[str, str, str, str]


def key_of(mutant: Mutant) -> Key:
    """Return a key of a mutant that does not depend on its line number, because other lines of the file may change."""
    return mutant.module.file, mutant.function, mutant.before, mutant.after


def read_equivalent(text: str) -> dict[Key, str]:
    """Read the equivalent mutants, each with its reason."""
    return {
        (entry["file"], entry["function"], entry["before"], after): entry["reason"]
        for entry in tomllib.loads(text).get("mutant", [])
        for after in entry["after"]
    }


def of_changed_lines(mutants: Iterable[Mutant], diff: str) -> list[Mutant]:
    """Return the mutants of statements with a line that a diff without context adds or changes."""
    changed: defaultdict[str, set[int]] = defaultdict(set)
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ ").removeprefix("b/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(found[1]), int(found[2] or 1)
            changed[name] |= set(range(start, start + count))
    return [each for each in mutants if not changed[_path_in_git(each)].isdisjoint(each.lines)]


def _path_in_git(mutant: Mutant) -> str:
    return mutant.module.path.relative_to(SOURCE.parent).as_posix()


def diff_since(revision: str, folder: Path) -> str | None:
    """Return the diff of a folder since the work tree branched off a revision; None if git does not know it.

    On that revision itself: since the previous commit. None means that any statement may have changed.
    """
    head, base = _git("rev-parse", "HEAD"), _git("merge-base", revision, "HEAD")
    if base == head:
        base = _git("rev-parse", "--verify", "HEAD~1")
    if base is None:
        return None
    return _git("diff", "-U0", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/", base.strip(), "--", str(folder))


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=SOURCE)
    return done.stdout if done.returncode == 0 else None
