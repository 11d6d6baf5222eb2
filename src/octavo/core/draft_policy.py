"""Chooses the number of draft tokens per request that maximizes tokens per second.

A draft comes from a draft model or from a lookup, for example of n-grams.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from octavo.core.step_cost import StepCost
from octavo.data.draft_stats import AcceptanceRates

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from octavo.data.model_output import ModelOutput
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput

    Known = tuple[AcceptanceRates, AcceptanceRates | None]  # rates of all requests, and of one request
    Candidate = tuple[float, int, int]  # minus the acceptance probability, request index, draft position

_FIRST_RATE = 0.7  # assumed acceptance rate before any draft was verified
_CREDIT_S = 0.01  # assumed initial gain by lookups
_OLDER_GUESSES = 0.95  # decay of sums per step with lookups
_SMALL_SHARE = 0.005  # tolerated loss by lookups, as a share of the steps' time
_STEPS_OF_A_TRIAL = 16  # above `_SMALL_SHARE`, only every 16th step tries lookups
_REQUESTS_OF_A_TRIAL = 8  # such a step tries lookups for this many requests


class DraftPolicy:
    """Decides how many drafts of each request are proposed and verified."""

    def __init__(self) -> None:
        self.step_cost = StepCost()
        self.pass_cost = StepCost()
        self._overall = AcceptanceRates(decay=0.98)
        self._overall_computed = AcceptanceRates(decay=0.98)
        self._computed: AbstractSet[str] = frozenset()
        self._has_drafts = False
        self._has_guesses = False
        self._most_passes = 0
        self._guessing_s = 0.0
        self._num_accepted = 0
        # Sums over recent steps with lookups:
        self._spent_s, self._gained_s, self._steps_s = 0.0, _CREDIT_S, 0.0
        self._num_skipped = 0
        self._first_tried = 0

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of a request's drafts were accepted."""
        self._num_accepted += num_accepted
        if request.request_id in self._computed:
            overall, of_request = self._overall_computed, request.computed_acceptance or AcceptanceRates()
            request.computed_acceptance = of_request
        else:
            overall, of_request = self._overall, request.acceptance or AcceptanceRates()
            request.acceptance = of_request
        overall.note(num_drafted, num_accepted)
        of_request.note(num_drafted, num_accepted)

    def learn(self, scheduled: SchedulerOutput, result: ModelOutput, seconds: float) -> tuple[float, float] | None:
        """Learn from a step's duration, unless the step computed prompt tokens. Call `verified` before.

        Return two durations in seconds:
        - The step, plus the drafting before the step.
        - The estimate for generating the same number of tokens without drafts.

        Return None if the step computed prompt tokens or verified no drafts, or if no estimate exists.

        seconds: The step's duration, including the drafting for the next step.
        """
        if not (self._has_drafts or result.drafting_s):
            return None
        self._computed = result.computed_drafts
        self._has_guesses = True
        guessing_s, self._guessing_s = self._guessing_s, result.drafting_s
        num_accepted, self._num_accepted = self._num_accepted, 0
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if self._num_skipped and not drafts:
            return None
        num_rows = len(counts) + sum(map(len, drafts.values()))
        if not counts or scheduled.scheduled_new_reqs or num_rows != scheduled.total_num_scheduled_tokens:
            return None
        step_s = max(seconds - result.drafting_s, 0.0)
        self.step_cost.learn(num_rows, step_s)
        self._learn_passes(scheduled, result)
        self._learn_gain(len(counts), num_rows, num_accepted, result.drafting_s, step_s)
        if not drafts or not self.step_cost.is_measured(len(counts)):
            return None
        # Slow first steps inflate the estimate.
        without_s = min(self.step_cost.seconds(len(counts)), step_s)
        return step_s + guessing_s, (1 + num_accepted / len(counts)) * without_s

    def _learn_passes(self, scheduled: SchedulerOutput, result: ModelOutput) -> None:
        num_passes, bounds = result.num_drafting_passes, scheduled.max_drafts
        if not num_passes:
            self.pass_cost.skip()
            return
        self._most_passes = max(self._most_passes, num_passes)
        num_guessed = sum(min(bounds.get(name, num_passes), num_passes) for name in result.computed_drafts)
        self.pass_cost.learn(max(round(num_guessed / num_passes), 1), result.drafting_s / num_passes)

    def _learn_gain(self, num_requests: int, num_rows: int, num_accepted: int, spent_s: float, step_s: float) -> None:
        without_s = self.step_cost.seconds(num_requests)
        if not self._num_skipped:
            self._spent_s = _OLDER_GUESSES * self._spent_s + spent_s
            self._gained_s *= _OLDER_GUESSES
            self._steps_s = _OLDER_GUESSES * self._steps_s + step_s
        gained_s = num_accepted / num_requests * without_s - (self.step_cost.seconds(num_rows) - without_s)
        self._gained_s += max(gained_s, 0.0)  # a loss is the fault of `allot`, not of lookups

    def _bound_lookups(self, names: Sequence[str]) -> dict[str, int]:
        if self._spent_s - self._gained_s <= _SMALL_SHARE * self._steps_s:
            self._num_skipped = 0
            return {}
        self._num_skipped = (self._num_skipped + 1) % _STEPS_OF_A_TRIAL
        if self._num_skipped or not names:
            return dict.fromkeys(names, 0)
        self._first_tried = (self._first_tried + _REQUESTS_OF_A_TRIAL) % len(names)
        order = [*names[self._first_tried :], *names[: self._first_tried]]
        return dict.fromkeys(order[_REQUESTS_OF_A_TRIAL:], 0)

    def bound(self, num_tokens: Mapping[str, int], requests: Mapping[str, Request]) -> dict[str, int]:
        """Return limits on the drafts to propose after a step, by request id. No entry means no limit.

        If only lookups propose drafts, a request has either no limit or the limit 0.
        """
        if not self._most_passes:
            return self._bound_lookups(list(num_tokens)) if self._has_guesses else {}
        wanted: list[tuple[Request, int]] = []
        for request_id, count in num_tokens.items():
            request = requests[request_id]
            num_known = len(request.sequence.token_ids)
            if request.num_computed_tokens + count >= num_known:
                wanted.append((request, max(min(self._most_passes, request.max_total_tokens - num_known - 2), 0)))
        if not wanted:
            return {}
        known = [(self._overall_computed, request.computed_acceptance) for request, _ in wanted]
        likeliest = _likeliest_first(wanted, known)
        counts = self._worthwhile(wanted, known, likeliest, len(wanted), self._passes_s(likeliest, len(wanted)))
        pairs = zip(wanted, counts, strict=True)
        return {request.request_id: count for (request, most), count in pairs if count < most}

    def allot(self, wanted: Sequence[tuple[Request, int]], num_decoding: int) -> list[int]:
        """Return how many drafts of each request the next step verifies.

        wanted: Pairs of a request and its number of proposed drafts.
        """
        if not wanted:
            return []
        self._has_drafts = True
        known: list[Known] = [
            (self._overall_computed, request.computed_acceptance)
            if request.request_id in self._computed
            else (self._overall, request.acceptance)
            for request, _ in wanted
        ]
        return self._worthwhile(wanted, known, _likeliest_first(wanted, known), num_decoding, repeat(self._guessing_s))

    def _passes_s(self, candidates: list[Candidate], num_requests: int) -> Iterator[float]:
        costs = [0.0, *(self.pass_cost.seconds(rows) for rows in range(1, num_requests + 1))]
        rows, total = [0] * self._most_passes, 0.0
        yield total
        for _, _, place in candidates:
            rows[place] += 1
            total += costs[rows[place]] - costs[rows[place] - 1]
            yield total

    def _worthwhile(
        self,
        wanted: Sequence[tuple[Request, int]],
        known: Sequence[Known],
        candidates: list[Candidate],
        num_decoding: int,
        guessing_s: Iterable[float],
    ) -> list[int]:
        seconds, costs = self.step_cost.seconds, iter(guessing_s)
        num_tokens, shortest, best = float(num_decoding), seconds(num_decoding), 0
        if shortest <= 0:
            best = len(candidates)
        else:
            most = num_tokens / (shortest + next(costs))
            for count, ((chance, _, _), cost) in enumerate(zip(candidates, costs, strict=False), 1):
                num_tokens -= chance  # chances are negative
                tokens_per_second = num_tokens / (seconds(num_decoding + count) + cost)
                if tokens_per_second > most:
                    most, best = tokens_per_second, count
        counts = [0] * len(wanted)
        for _, index, _ in candidates[:best]:
            counts[index] += 1
        for (_, num_wanted), (_, of_request), count in zip(wanted, known, counts, strict=True):
            if of_request is not None and count < num_wanted:  # a low rate must not last forever
                of_request.fade()
        if not any(counts):
            for overall in {id(each): each for each, _ in known}.values():
                overall.fade()
        return counts


def _likeliest_first(wanted: Sequence[tuple[Request, int]], known: Sequence[Known]) -> list[Candidate]:
    longest = max(count for _, count in wanted)
    kinds = {id(overall): overall for overall, _ in known}
    priors_of = {name: overall.rates([_FIRST_RATE] * longest) for name, overall in kinds.items()}
    candidates: list[Candidate] = []
    for index, ((_, count), (overall, of_request)) in enumerate(zip(wanted, known, strict=True)):
        priors = priors_of[id(overall)][:count]
        chance = 1.0
        for place, rate in enumerate(priors if of_request is None else of_request.rates(priors)):
            chance *= rate
            candidates.append((-chance, index, place))
    candidates.sort()
    return candidates
