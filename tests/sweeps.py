"""Draws the cases of sweeps, and the expensive tests, that run."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


def commit_suffix() -> str:
    """Return "-" and the short hash of the commit; "" outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"-{found.stdout.strip()}"


def left_out(cases: list[Case], one_in: int, seed: str) -> list[Case]:
    """Return the cases that do not run: all but one random case of every `one_in` consecutive ones.

    So each run covers every part of a sweep, whatever its order.
    """
    draw = random.Random(seed)
    rows = [cases[first : first + one_in] for first in range(0, len(cases), one_in)]
    kept = [draw.randrange(len(row)) for row in rows]
    return [case for row, index in zip(rows, kept, strict=True) for case in row[:index] + row[index + 1 :]]


def is_its_turn(one_in: int, seed: str) -> bool:
    """Return whether an expensive test runs, which it does in one of `one_in` runs on average."""
    return random.Random(seed).randrange(one_in) == 0
