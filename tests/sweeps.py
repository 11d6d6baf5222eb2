"""Draws which cases of wide sweeps run."""

from __future__ import annotations

import random
from typing import TypeVar

Case = TypeVar("Case")


def left_out(cases: list[Case], one_in: int, seed: str) -> list[Case]:
    """Return the cases that do not run: all but one, drawn at random, of every `one_in` that follow one another.

    So each part of a sweep is seen each time, whatever its order.
    """
    draw = random.Random(seed)
    rows = [cases[first : first + one_in] for first in range(0, len(cases), one_in)]
    kept = [draw.randrange(len(row)) for row in rows]
    return [case for row, index in zip(rows, kept, strict=True) for case in row[:index] + row[index + 1 :]]
