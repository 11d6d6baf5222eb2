"""Chooses how many drafts each request gets: the number that gives the most tokens per second.

A row of a step is cheap while a step is bound by reading weights, and has its full cost if many requests share the
step. A draft that is looked up costs almost nothing; a draft that a model computes costs one pass of the draft model
per token. These costs, and acceptance rates, are learned from measured steps. Unknown costs and rates count as good, so
that drafts are tried. So drafting stops by itself if it does not pay, and is tried again from time to time. The choice
changes which tokens share a step, never a token.
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

    Known = tuple[AcceptanceRates, AcceptanceRates | None]  # rates of all drafts of the same kind, and of one request
    Candidate = tuple[float, int, int]  # a draft: minus its probability of acceptance, its request's index, its place

_FIRST_RATE = 0.7  # assumed acceptance rate of a draft, before any was verified
_CREDIT_S = 0.01  # seconds that lookups of drafts may take before they gain anything
_OLDER_GUESSES = 0.95  # weight of earlier lookups, relative to the newest
_SMALL_SHARE = 0.005  # share of a step's time that a lookup may always take
_STEPS_OF_A_TRIAL = 16  # one step in so many looks drafts up if lookups take more than they gain
_REQUESTS_OF_A_TRIAL = 8  # number of requests in a trial, different ones each time


class DraftPolicy:
    """Allots drafts to requests, and learns their costs and rates.

    It is the only writer of what is learned, including `Request.acceptance` and `Request.computed_acceptance`.
    The choice is greedy: of all drafts, sorted by probability, it takes the leading ones that give the most tokens per
    second. That is optimal if all rows cost the same.
    """

    def __init__(self) -> None:
        self.step_cost = StepCost()
        self.pass_cost = StepCost()
        self._everyone = AcceptanceRates(decay=0.98)
        self._everyone_computed = AcceptanceRates(decay=0.98)
        self._computed: AbstractSet[str] = frozenset()  # requests whose newest drafts a model computed
        self._has_drafts = False  # whether any draft was proposed; until then steps cost nothing here
        self._has_guesses = False
        self._most_passes = 0  # largest number of tokens that the draft model guesses for a request; 0 without a model
        self._guessing_s = 0.0  # seconds of the newest drafting
        self._num_accepted = 0  # accepted drafts of the step whose result is being processed
        # Seconds of recent lookups of drafts, gained by them, and of their steps; the gain begins with a credit.
        self._spent_s, self._gained_s, self._steps_s = 0.0, _CREDIT_S, 0.0
        self._num_skipped = 0  # steps since the newest lookup
        self._first_tried = 0  # index of the first request of the newest trial

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of a request's verified drafts were accepted."""
        self._num_accepted += num_accepted
        if request.request_id in self._computed:
            everyone, own = self._everyone_computed, request.computed_acceptance or AcceptanceRates()
            request.computed_acceptance = own
        else:
            everyone, own = self._everyone, request.acceptance or AcceptanceRates()
            request.acceptance = own
        everyone.note(num_drafted, num_accepted)
        own.note(num_drafted, num_accepted)

    def learn(self, scheduled: SchedulerOutput, result: ModelOutput, seconds: float) -> tuple[float, float] | None:
        """Learn from the duration of a step, and from the time that drafting for the next step took.

        seconds: of the step, drafting included. Call `verified` for its drafts before. Steps with prompts are ignored:
        their rows have other costs than those of decodes.

        Returns the seconds of a step with drafts, including their drafting, and the seconds that the same number of
        tokens takes without drafts. Returns None if the step had no drafts, or if the second number is not known.
        """
        if not (self._has_drafts or result.drafting_s):
            return None
        self._computed = result.computed_drafts
        self._has_guesses = True
        guessing_s, self._guessing_s = self._guessing_s, result.drafting_s
        num_accepted, self._num_accepted = self._num_accepted, 0
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if self._num_skipped and not drafts:
            return None  # while lookups are skipped, a step should cost no more than without drafting
        num_rows = len(counts) + sum(map(len, drafts.values()))
        if not counts or scheduled.scheduled_new_reqs or num_rows != scheduled.total_num_scheduled_tokens:
            return None
        step_s = max(seconds - result.drafting_s, 0.0)
        self.step_cost.learn(num_rows, step_s)
        self._learn_passes(scheduled, result)
        self._learn_gain(len(counts), num_rows, num_accepted, result.drafting_s, step_s)
        if not drafts or not self.step_cost.is_measured(len(counts)):
            return None
        # A step with fewer rows takes no longer than this one. The estimate may be longer, from slow first steps.
        without_s = min(self.step_cost.seconds(len(counts)), step_s)
        return step_s + guessing_s, (1 + num_accepted / len(counts)) * without_s

    def _learn_passes(self, scheduled: SchedulerOutput, result: ModelOutput) -> None:
        """Learn the duration of a pass of the draft model, which guesses one token for each request below its bound."""
        num_passes, bounds = result.num_drafting_passes, scheduled.max_drafts
        if not num_passes:
            self.pass_cost.skip()
            return
        self._most_passes = max(self._most_passes, num_passes)
        num_guessed = sum(min(bounds.get(name, num_passes), num_passes) for name in result.computed_drafts)
        self.pass_cost.learn(max(round(num_guessed / num_passes), 1), result.drafting_s / num_passes)

    def _learn_gain(self, num_requests: int, num_rows: int, num_accepted: int, spent_s: float, step_s: float) -> None:
        """Learn what a lookup of drafts cost, and what the drafts gained that were verified in the same step."""
        without_s = self.step_cost.seconds(num_requests)
        if not self._num_skipped:
            self._spent_s = _OLDER_GUESSES * self._spent_s + spent_s
            self._gained_s *= _OLDER_GUESSES
            self._steps_s = _OLDER_GUESSES * self._steps_s + step_s
        gained_s = num_accepted / num_requests * without_s - (self.step_cost.seconds(num_rows) - without_s)
        self._gained_s += max(gained_s, 0.0)  # rows of rejected drafts are no cost of the lookup: `allot` chose them

    def _bound_lookups(self, names: Sequence[str]) -> dict[str, int]:
        """Bound lookups of drafts: to 0 if they recently cost more than they gained, plus a small share for noise.

        One step in `_STEPS_OF_A_TRIAL` tries them again, for `_REQUESTS_OF_A_TRIAL` requests. Returns bounds by id.
        """
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
        """Return how many drafts are worth guessing after a step. Requests that it omits have no bound.

        num_tokens: number of tokens of each request in the step. If a model drafts, the bound is the number of drafts
        that it should compute. Lookups are bounded to 0 or not at all: `allot` chooses among the drafts that they find.
        """
        if not self._most_passes:
            return self._bound_lookups(list(num_tokens)) if self._has_guesses else {}
        wanted: list[tuple[Request, int]] = []
        for request_id, count in num_tokens.items():
            request = requests[request_id]
            num_known = len(request.sequence.token_ids)
            if request.num_computed_tokens + count >= num_known:  # it gets a token now, and one after its drafts
                wanted.append((request, max(min(self._most_passes, request.max_total_tokens - num_known - 2), 0)))
        if not wanted:
            return {}
        known = [(self._everyone_computed, request.computed_acceptance) for request, _ in wanted]
        likeliest = _likeliest_first(wanted, known)
        counts = self._worthwhile(wanted, known, likeliest, len(wanted), self._passes_s(likeliest, len(wanted)))
        pairs = zip(wanted, counts, strict=True)
        return {request.request_id: count for (request, most), count in pairs if count < most}

    def allot(self, wanted: Sequence[tuple[Request, int]], num_decoding: int) -> list[int]:
        """Return how many drafts of each request the next step verifies.

        wanted: requests, each with its number of available drafts. num_decoding: number of requests that get a token in
        the step, with or without drafts.
        """
        if not wanted:
            return []
        self._has_drafts = True
        known: list[Known] = [
            (self._everyone_computed, request.computed_acceptance)
            if request.request_id in self._computed
            else (self._everyone, request.acceptance)
            for request, _ in wanted
        ]
        return self._worthwhile(wanted, known, _likeliest_first(wanted, known), num_decoding, repeat(self._guessing_s))

    def _passes_s(self, candidates: list[Candidate], num_requests: int) -> Iterator[float]:
        """Yield the seconds of computing the first 0, 1, 2, ... candidates. Each place in a draft needs one pass."""
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
        """Return for each request the number of drafts that gives the most tokens per second.

        candidates: sorted, the most probable one first. guessing_s: seconds of drafting the first 0, 1, 2, ... of them.
        """
        seconds, costs = self.step_cost.seconds, iter(guessing_s)
        num_tokens, shortest, best = float(num_decoding), seconds(num_decoding), 0
        if shortest <= 0:
            best = len(candidates)
        else:
            most = num_tokens / (shortest + next(costs))
            for count, ((chance, _, _), cost) in enumerate(zip(candidates, costs, strict=False), 1):
                num_tokens -= chance
                tokens_per_second = num_tokens / (seconds(num_decoding + count) + cost)
                if tokens_per_second > most:
                    most, best = tokens_per_second, count
        counts = [0] * len(wanted)
        for _, index, _ in candidates[:best]:
            counts[index] += 1
        for (_, num_wanted), (_, own), count in zip(wanted, known, counts, strict=True):
            if own is not None and count < num_wanted:  # otherwise low rates would exclude a request for good
                own.fade()
        if not any(counts):
            for everyone in {id(each): each for each, _ in known}.values():
                everyone.fade()
        return counts


def _likeliest_first(wanted: Sequence[tuple[Request, int]], known: Sequence[Known]) -> list[Candidate]:
    longest = max(count for _, count in wanted)
    kinds = {id(everyone): everyone for everyone, _ in known}
    priors_of = {name: everyone.rates([_FIRST_RATE] * longest) for name, everyone in kinds.items()}
    candidates: list[Candidate] = []
    for index, ((_, count), (everyone, own)) in enumerate(zip(wanted, known, strict=True)):
        priors = priors_of[id(everyone)][:count]
        chance = 1.0
        for place, rate in enumerate(priors if own is None else own.rates(priors)):
            chance *= rate
            candidates.append((-chance, index, place))
    candidates.sort()
    return candidates
