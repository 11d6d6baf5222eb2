"""How many of its drafts each request has verified in the next step: as many as let most tokens a second come of it.

A row of a step costs little while weights are what a step waits for, and its full share where many requests are
computed together. Both that and how often drafts come true are learned from the steps as they are measured; what is not
known yet is taken to be good, so that it is tried. So drafts cease by themselves where they do not pay, and are tried
again from time to time. They change which tokens share a step, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from octavo.data.draft_stats import AcceptanceRates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput

_FIRST_RATE = 0.7  # of a draft, before any was verified


@dataclass(slots=True)
class _Measured:
    """Steps of about so many rows. rows, seconds: what they had, on average; last: the number of the newest one."""

    rows: float
    seconds: float
    last: int


class StepCost:
    """How long a step of so many rows takes, as measured lately.

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
        oldest = self._num_steps - self._NUM_STEPS_KEPT
        self._measured = {size: each for size, each in sorted(self._measured.items()) if each.last > oldest}
        slowest = accumulate((each.seconds for each in self._measured.values()), max)  # more rows never take less
        self._curve = [(each.rows, most) for each, most in zip(self._measured.values(), slowest, strict=True)]

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


class DraftPolicy:
    """Allots drafts to requests; the only writer of what is learned, that of `Request.acceptance` included.

    The choice is greedy: the likeliest drafts of all requests first, and of these as many as give the most tokens a
    second, which is the most there can be where rows cost alike.
    """

    def __init__(self) -> None:
        self.step_cost = StepCost()
        self._everyone = AcceptanceRates(decay=0.98)
        self._has_drafts = False  # a proposer is there; else steps cost nothing here

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Take in how many drafts of a request came true."""
        self._everyone.note(num_drafted, num_accepted)
        request.acceptance = request.acceptance or AcceptanceRates()
        request.acceptance.note(num_drafted, num_accepted)

    def learn(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step took, unless prompts shared it: their rows cost other than those of answers."""
        if not self._has_drafts:
            return
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        num_rows = len(counts) + sum(map(len, drafts.values()))
        if counts and not scheduled.scheduled_new_reqs and num_rows == scheduled.total_num_scheduled_tokens:
            self.step_cost.learn(num_rows, seconds)

    def allot(self, wanted: Sequence[tuple[Request, int]], num_decoding: int) -> list[int]:
        """Return how many drafts each request gets of the next step; wanted: how many there are of each.

        num_decoding: requests that get a token of the step, with drafts or without.
        """
        if not wanted:
            return []
        self._has_drafts = True
        longest = max(count for _, count in wanted)
        priors = self._everyone.rates([_FIRST_RATE] * longest)
        candidates: list[tuple[float, int]] = []
        for index, (request, count) in enumerate(wanted):
            rates = priors[:count] if request.acceptance is None else request.acceptance.rates(priors[:count])
            chance = 1.0
            for rate in rates:
                chance *= rate
                candidates.append((-chance, index))
        candidates.sort()
        counts = [0] * len(wanted)
        for _, index in candidates[: self._num_worthwhile([-each for each, _ in candidates], num_decoding)]:
            counts[index] += 1
        self._fade(wanted, counts)
        return counts

    def _num_worthwhile(self, chances: list[float], num_decoding: int) -> int:
        """Return how many of the drafts, the likeliest first, let the most tokens a second come of a step."""
        seconds = self.step_cost.seconds
        num_tokens, shortest, best = float(num_decoding), seconds(num_decoding), 0
        if shortest <= 0:
            return len(chances)
        most = num_tokens / shortest
        for count, chance in enumerate(chances, 1):
            num_tokens += chance
            tokens_per_second = num_tokens / seconds(num_decoding + count)
            if tokens_per_second > most:
                most, best = tokens_per_second, count
        return best

    def _fade(self, wanted: Sequence[tuple[Request, int]], counts: list[int]) -> None:
        """Forget slowly why requests get no drafts, or they would never get any again."""
        for (request, num_wanted), count in zip(wanted, counts, strict=True):
            if request.acceptance is not None and count < num_wanted:
                request.acceptance.fade()
        if not any(counts):
            self._everyone.fade()
