"""Estimates the duration of a step from its size, learned from measured steps."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class _Measured:
    """Measured steps of similar size. rows, seconds: their averages. last: the number of the newest one."""

    rows: float
    seconds: float
    last: int


class StepCost:
    """Recent durations of steps, or of passes of a draft model, by number of rows.

    Beyond the measured sizes, more rows count as free, and fewer rows as proportionally faster. These estimates are
    optimistic, so that such sizes are tried.
    """

    _WEIGHT = 0.2  # of the newest step of its size
    _LARGEST = 2.0  # a slower step counts as so many times the average: it may be slow for other reasons
    _NUM_STEPS_KEPT = 1000  # older measurements are dropped

    def __init__(self) -> None:
        self._num_steps = 0
        self._measured: dict[int, _Measured] = {}
        self._curve: list[tuple[float, float]] = []  # (rows, seconds), rising in both

    def learn(self, rows: int, seconds: float) -> None:
        """Learn that a step of `rows` rows took `seconds` seconds."""
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
        """Count a step without a measurement, so that older measurements age."""
        self._num_steps += 1
        self._forget_old()

    def _forget_old(self) -> None:
        oldest = self._num_steps - self._NUM_STEPS_KEPT
        self._measured = {size: each for size, each in sorted(self._measured.items()) if each.last > oldest}
        slowest = accumulate((each.seconds for each in self._measured.values()), max)  # more rows never take less
        self._curve = [(each.rows, most) for each, most in zip(self._measured.values(), slowest, strict=True)]

    def is_measured(self, rows: int) -> bool:
        """Return whether a step of `rows` rows, or of fewer, was measured. Call `learn` at least once before."""
        return self._curve[0][0] <= rows

    def seconds(self, rows: int) -> float:
        """Return the estimated seconds of a step of `rows` rows; 0 if nothing was measured."""
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
