"""What a step takes, by its size: learned from steps as they are measured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class _Measured:
    """Steps of about so many rows. rows, seconds: what they had, on average; last: the number of the newest one."""

    rows: float
    seconds: float
    last: int


class StepCost:
    """How long a step of so many rows takes, as measured lately; or a pass of a drafting model.

    Where nothing was measured, more rows are taken to be free, and fewer ones to take proportionally less: so whichever
    looks better is tried.
    """

    _WEIGHT = 0.2  # of the newest step among those like it
    _LARGEST = 2.0  # so many times the average at most: a step may be slow for reasons of its own
    _NUM_STEPS_KEPT = 1000  # what was measured before these is no more known

    def __init__(self) -> None:
        self._num_steps = 0
        self._measured: dict[int, _Measured] = {}
        self._curve: list[tuple[float, float]] = []  # (rows, seconds), rising in both

    def learn(self, rows: int, seconds: float) -> None:
        """Take in a step."""
        self._num_steps += 1
        shift = max(rows.bit_length() - 3, 0)  # 1 to 8, then four sizes up to each power of two
        known = self._measured.get(rows >> shift << shift)
        if known is None:
            self._measured[rows >> shift << shift] = _Measured(rows, seconds, self._num_steps)
        else:
            known.rows += self._WEIGHT * (rows - known.rows)
            known.seconds += self._WEIGHT * (min(seconds, self._LARGEST * known.seconds) - known.seconds)
            known.last = self._num_steps
        self._forget_old()

    def skip(self) -> None:
        """Let a step pass in which there was nothing to measure; what is known becomes older by it."""
        self._num_steps += 1
        self._forget_old()

    def _forget_old(self) -> None:
        oldest = self._num_steps - self._NUM_STEPS_KEPT
        self._measured = {size: each for size, each in sorted(self._measured.items()) if each.last > oldest}
        slowest = accumulate((each.seconds for each in self._measured.values()), max)  # more rows never take less
        self._curve = [(each.rows, most) for each, most in zip(self._measured.values(), slowest, strict=True)]

    def is_measured(self, rows: int) -> bool:
        """Whether steps of so many rows, or of fewer, are among those that were measured."""
        return self._curve[0][0] <= rows

    def seconds(self, rows: int) -> float:
        """Return how long a step takes; 0 where nothing is known."""
        curve = self._curve
        if not curve:
            return 0.0
        index = bisect_left(curve, (rows,))
        if index == len(curve):
            return curve[-1][1]
        more, slower = curve[index]
        if index == 0:
            return slower * rows / more
        fewer, faster = curve[index - 1]
        return faster + (slower - faster) * (rows - fewer) / (more - fewer)
