"""How many drafts each request has: as many are guessed and verified as let most tokens a second come of a step.

A row of a step costs little while weights are what a step waits for, and its full share where many requests are
computed together. A guess that is looked up costs next to nothing; one that is computed costs a pass of the drafting
model for each of its tokens. All of that, and how often drafts come true, is learned from the steps as they are
measured; what is not known yet is taken to be good, so that it is tried. So drafts cease by themselves where they do
not pay, and are tried again from time to time. They change which tokens share a step, never a token.
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

    Known = tuple[AcceptanceRates, AcceptanceRates | None]  # of a request's drafts: of all like them, and of its own
    Candidate = tuple[float, int, int]  # of a draft: - its chance to come true, its request's index, and its place

_FIRST_RATE = 0.7  # of a draft, before any was verified
_CREDIT_S = 0.01  # guesses that are looked up may take so much before they gain anything
_OLDER_GUESSES = 0.95  # what those before a guess count
_SMALL_SHARE = 0.005  # of a step, which a guess may take in any case
_STEPS_OF_A_TRIAL = 16  # one guess in so many steps, where guesses take more than they gain
_REQUESTS_OF_A_TRIAL = 8  # for which it is made, others each time


class DraftPolicy:
    """Allots drafts to requests; the only writer of what is learned, that of `Request.acceptance` included.

    The choice is greedy: the likeliest drafts of all requests first, and of these as many as give the most tokens a
    second, which is the most there can be where rows cost alike.
    """

    def __init__(self) -> None:
        self.step_cost = StepCost()
        self.pass_cost = StepCost()
        self._everyone = AcceptanceRates(decay=0.98)
        self._everyone_computed = AcceptanceRates(decay=0.98)
        self._computed: AbstractSet[str] = frozenset()  # requests whose newest drafts a model computed
        self._has_drafts = False  # a proposer is there; else steps cost nothing here
        self._has_guesses = False
        self._most_passes = 0  # so many tokens of a request a drafting model guesses; 0 where there is none
        self._guessing_s = 0.0  # what the newest guess took
        self._num_accepted = 0  # of the step whose result is taken in
        # Of the newest guesses that were looked up, and of their steps; what was gained begins with a credit.
        self._spent_s, self._gained_s, self._steps_s = 0.0, _CREDIT_S, 0.0
        self._num_skipped = 0  # steps since the newest guess
        self._first_tried = 0  # request of the newest trial

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Take in how many drafts of a request came true."""
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
        """Take in how long a step took, its drafts being verified, and what guessing the next ones took.

        Nothing is learned where prompts shared it: their rows cost other than those of answers.

        Return what a step with drafts took, guessing them included, and what as many tokens take without, in seconds;
        None where there were no drafts, and where that is not known.
        """
        if not (self._has_drafts or result.drafting_s):
            return None
        self._computed = result.computed_drafts
        self._has_guesses = True
        guessing_s, self._guessing_s = self._guessing_s, result.drafting_s
        num_accepted, self._num_accepted = self._num_accepted, 0
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if self._num_skipped and not drafts:
            return None  # what steps take is measured where it is asked for: this one should cost no more than without
        num_rows = len(counts) + sum(map(len, drafts.values()))
        if not counts or scheduled.scheduled_new_reqs or num_rows != scheduled.total_num_scheduled_tokens:
            return None
        step_s = max(seconds - result.drafting_s, 0.0)
        self.step_cost.learn(num_rows, step_s)
        self._learn_passes(scheduled, result)
        self._learn_gain(len(counts), num_rows, num_accepted, result.drafting_s, step_s)
        if not drafts or not self.step_cost.is_measured(len(counts)):
            return None
        # Steps of fewer rows take no longer than this one did, even where the first ones, still cold, were slow.
        without_s = min(self.step_cost.seconds(len(counts)), step_s)
        return step_s + guessing_s, (1 + num_accepted / len(counts)) * without_s

    def _learn_passes(self, scheduled: SchedulerOutput, result: ModelOutput) -> None:
        """Take in what a pass took, each of which guesses one more token of whom it is for, up to its bound."""
        num_passes, bounds = result.num_drafting_passes, scheduled.max_drafts
        if not num_passes:
            self.pass_cost.skip()
            return
        self._most_passes = max(self._most_passes, num_passes)
        num_guessed = sum(min(bounds.get(name, num_passes), num_passes) for name in result.computed_drafts)
        self.pass_cost.learn(max(round(num_guessed / num_passes), 1), result.drafting_s / num_passes)

    def _learn_gain(self, num_requests: int, num_rows: int, num_accepted: int, spent_s: float, step_s: float) -> None:
        """Take in what a guess took, and what the drafts gained that were verified in the same step."""
        without_s = self.step_cost.seconds(num_requests)
        if not self._num_skipped:
            self._spent_s = _OLDER_GUESSES * self._spent_s + spent_s
            self._gained_s *= _OLDER_GUESSES
            self._steps_s = _OLDER_GUESSES * self._steps_s + step_s
        gained_s = num_accepted / num_requests * without_s - (self.step_cost.seconds(num_rows) - without_s)
        self._gained_s += max(gained_s, 0.0)  # rows in vain are none of the guess's cost: who verified them decides

    def _bound_lookups(self, names: Sequence[str]) -> dict[str, int]:
        """Bound guesses that are looked up: to none where they cost more than they gained of late, and than noise does.

        Seldom they are tried again, for a few requests.
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
        """Return how many drafts are worth guessing at a step's end, where that is less than there could be.

        num_tokens: of its requests. Where a model drafts that is about what it computes. Guesses that are looked up are
        made or not: of those that are there `allot` takes what is worth a row.
        """
        if not self._most_passes:
            return self._bound_lookups(list(num_tokens)) if self._has_guesses else {}
        wanted: list[tuple[Request, int]] = []
        for request_id, count in num_tokens.items():
            request = requests[request_id]
            num_known = len(request.sequence.token_ids)
            if request.num_computed_tokens + count >= num_known:  # it gets a token, and one behind its drafts
                wanted.append((request, max(min(self._most_passes, request.max_total_tokens - num_known - 2), 0)))
        if not wanted:
            return {}
        known = [(self._everyone_computed, request.computed_acceptance) for request, _ in wanted]
        likeliest = _likeliest_first(wanted, known)
        counts = self._worthwhile(wanted, known, likeliest, len(wanted), self._passes_s(likeliest, len(wanted)))
        pairs = zip(wanted, counts, strict=True)
        return {request.request_id: count for (request, most), count in pairs if count < most}

    def allot(self, wanted: Sequence[tuple[Request, int]], num_decoding: int) -> list[int]:
        """Return how many drafts each request gets of the next step; wanted: how many there are of each.

        num_decoding: requests that get a token of the step, with drafts or without.
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
        """Yield what computing none of the drafts takes, the first one, the first two ...: a pass for each place."""
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
        """Return how many drafts of each request let the most tokens a second come of a step.

        guessing_s: seconds that the guess takes of none of the candidates, of the first one, of the first two ...
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
            if own is not None and count < num_wanted:  # or it would never get any again
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
