"""Estimates the duration of a step from recent steps."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class _Measured:
    rows: float
    seconds: float
    last: int


class StepCost:
    """Estimates the duration of steps, draft model passes or KV loads from the number of tokens (`rows`).

    Above the largest measured size, the estimate stays constant. Below the smallest measured size, the estimate is
    proportional to the size. Both estimates tend to be too short.
    """

    _WEIGHT = 0.2
    _LARGEST = 2.0  # longer durations count as this multiple of the average
    _NUM_STEPS_KEPT = 1000

    def __init__(self) -> None:
        self._num_steps = 0
        self._measured: dict[int, _Measured] = {}
        self._curve: list[tuple[float, float]] = []  # (rows, seconds), sorted

    def learn(self, rows: int, seconds: float) -> None:
        """Learn a step's duration."""
        self._num_steps += 1
        shift = max(rows.bit_length() - 3, 0)  # size classes 1 to 8, then 10, 12, 14, 16, 20, 24, ...
        known = self._measured.get(rows >> shift << shift)
        if known is None:
            self._measured[rows >> shift << shift] = _Measured(rows, seconds, self._num_steps)
        else:
            known.rows += self._WEIGHT * (rows - known.rows)
            known.seconds += self._WEIGHT * (min(seconds, self._LARGEST * known.seconds) - known.seconds)
            known.last = self._num_steps
        self._forget_old()

    def skip(self) -> None:
        """Count an unmeasured step, so that old durations expire."""
        self._num_steps += 1
        self._forget_old()

    def _forget_old(self) -> None:
        oldest = self._num_steps - self._NUM_STEPS_KEPT
        self._measured = {size: each for size, each in sorted(self._measured.items()) if each.last > oldest}
        slowest = accumulate((each.seconds for each in self._measured.values()), max)
        self._curve = [(each.rows, most) for each, most in zip(self._measured.values(), slowest, strict=True)]

    def is_measured(self, rows: int) -> bool:
        """Return True if the smallest measured step has at most `rows` tokens. Call `learn` before."""
        return self._curve[0][0] <= rows

    def seconds(self, rows: int) -> float:
        """Return the estimated duration of a step, or 0 if unknown."""
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
