"""Rules for order, preemption and batching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.config import BatchingMode, PreemptionMode, SchedulingPolicy
from octavo.core.fair_share import FairRequestQueue, ServiceCounters
from octavo.core.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from octavo.config import ResolvedSchedulerConfig, SchedulerConfig
    from octavo.core.step_plan import StepPlan
    from octavo.data.request import Request

    Grow: TypeAlias = Callable[[StepPlan, Sequence[Request]], None]
    Admit: TypeAlias = Callable[[StepPlan, Request | None], None]

Rank = tuple[float, ...]


def num_tokens_to_schedule(
    num_remaining: int, budget: int, *, threshold: int, may_be_cut: bool, initial_budget: int
) -> int:
    """Return how many of a request's `num_remaining` tokens a step computes. If 0, the request waits.

    threshold: Maximum for one request, or 0 for no limit.
    may_be_cut: If False, tokens are split only if they exceed `initial_budget`, the budget of an empty step.
    """
    if threshold:
        num_remaining = min(num_remaining, threshold)
    if num_remaining <= budget:
        return num_remaining
    if not may_be_cut and num_remaining <= initial_budget:
        return 0
    return max(budget, 0)


class PromptCost:
    """Computes the token budget that a prompt's chunks use.

    Each token of a chunk that begins at `position` uses 1 + attention_cost_tokens * position / 1000 of the budget.
    """

    def __init__(self, attention_cost_tokens: float) -> None:
        self._per_position = attention_cost_tokens / 1000

    def num_tokens_within(self, budget: int, position: int) -> int:
        """Return how many tokens of a chunk at `position` fit the budget: at least one if budget > 0."""
        if budget <= 0 or not self._per_position:
            return budget
        return max(int(budget / (1 + self._per_position * position)), 1)

    def surcharge(self, position: int, count: int, budget: int) -> int:
        """Return the budget that a chunk uses beyond its `count` tokens, at most `budget - count`."""
        return min(math.ceil(count * self._per_position * position), budget - count)


PLAIN_COST = PromptCost(0.0)


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """An order of requests. A smaller rank is more important."""

    waiting: RequestQueue
    rank: Callable[[Request], Rank]
    counters: ServiceCounters
    ranks_are_fixed: bool  # False if ranks change with the tenants' counters


def create_policy(config: SchedulerConfig) -> OrderPolicy:
    """Create the order for `config.policy`."""
    counters = ServiceCounters(config.fair_input_weight, config.fair_output_weight)
    ranks: dict[SchedulingPolicy, Callable[[Request], Rank]] = {
        SchedulingPolicy.FCFS: lambda r: (r.arrival_index,),
        SchedulingPolicy.PRIORITY: lambda r: rank_by_priority(r, config.ageing_s),
        SchedulingPolicy.DEADLINE: lambda r: rank_by_deadline(r, config.ageing_s),
        SchedulingPolicy.FAIR: lambda r: (counters.served(r.tenant), *rank_by_priority(r, config.ageing_s)),
    }
    is_fair = config.policy is SchedulingPolicy.FAIR
    rank_in_queue = ranks[SchedulingPolicy.PRIORITY if is_fair else config.policy]
    queue = create_request_queue(config.policy, rank_in_queue, counters)
    return OrderPolicy(queue, ranks[config.policy], counters, ranks_are_fixed=not is_fair)


def create_request_queue(
    policy: SchedulingPolicy,
    rank: Callable[[Request], Rank] | None = None,
    counters: ServiceCounters | None = None,
) -> RequestQueue:
    """Create a policy's queue. Under `fair`, `rank` orders the requests of one tenant."""
    if policy is SchedulingPolicy.FAIR:
        return FairRequestQueue(counters, rank)
    if policy is SchedulingPolicy.FCFS:
        return FCFSRequestQueue()
    return PriorityRequestQueue(rank)


def rank_by_priority(request: Request, ageing_s: float | None) -> Rank:
    """Return a rank by priority number, then by arrival.

    A priority number decreases by one every `ageing_s` seconds (None: never, 0: priorities are ignored). All requests
    age equally, so the order of two requests never changes.
    """
    if ageing_s is None:
        return (request.priority, request.arrival_index)
    if ageing_s == 0:
        return (request.arrival_index,)
    return (request.priority + request.arrival_time / ageing_s, request.arrival_index)


def rank_by_deadline(request: Request, ageing_s: float | None) -> Rank:
    """Return a rank by deadline, then by arrival.

    ageing_s: If not None, the rank's deadline is at most `ageing_s` seconds after arrival.
    """
    deadline = math.inf if request.deadline is None else request.deadline
    horizon = math.inf if ageing_s is None else request.arrival_time + ageing_s
    return (min(deadline, horizon), request.arrival_index)


def choose_victim(running: Sequence[Request], rank: Callable[[Request], Rank], max_preemptions: int) -> Request | None:
    """Return the least important running request that may be preempted, or None.

    The most important request, and requests preempted `max_preemptions` times, are never preempted.
    """
    first = min(running, key=rank)
    candidates = [r for r in running if r is not first and r.num_preemptions < max_preemptions]
    return max(candidates, key=rank) if candidates else None


def should_swap(config: SchedulerConfig, num_tokens: int, num_blocks: int) -> bool:
    """Return True if a preempted request's KV should be swapped out instead of computed again."""
    if config.preemption is PreemptionMode.AUTO:
        return num_blocks * config.swap_block_cost_tokens < num_tokens
    return config.preemption is PreemptionMode.SWAP and num_blocks > 0


def is_prefill(request: Request, num_computed_tokens: int | None = None) -> bool:
    """Return True if a request has no output yet, or if any token before its newest token is not computed."""
    sequence = request.sequence
    num_computed = request.num_computed_tokens if num_computed_tokens is None else num_computed_tokens
    return len(sequence.token_ids) - num_computed > 1 or not sequence.num_output_tokens


def is_decode(request: Request) -> bool:
    """Return `not is_prefill(request)`."""
    return not is_prefill(request)


class Batching(Protocol):
    """A rule for filling a step with tokens."""

    @property
    def prefill_limit(self) -> int:
        """Maximum number of prompt tokens in a step that also decodes, or 0 for no limit."""
        ...

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """Fill a step's plan. `grow` gives tokens to running requests, and `admit` starts waiting requests.

        outranked: Running prompts that are less important than the first waiting request.
        """
        ...

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step's duration."""
        ...


class MixedBatching:
    """Serves running requests, then waiting requests. Prompts and decodes share steps.

    A step with decodes has at most `most` prompt tokens (0: no limit). If `step_s` is not 0, this limit adapts between
    `least` and `most`, so that steps take `step_s` seconds. Sarathi-Serve (Agrawal et al. 2024) profiles
    the limit instead.
    """

    _SHRINK, _GROW = 0.5, 1.25  # minimum and maximum factor of one change

    def __init__(self, most: int, least: int = 0, step_s: float = 0.0) -> None:
        self._most, self._least, self._step_s = float(most), float(least), step_s
        self._limit = self._least if step_s else self._most

    @property
    def prefill_limit(self) -> int:
        """See `Batching`."""
        return int(self._limit)

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """See `Batching`."""
        decoded: list[int] = []
        if self._limit:
            decoded = [request.num_tokens - request.num_computed_tokens for request in running if is_decode(request)]
            if decoded:  # room for all decodes, and at least one token per running prompt
                num_prompts = len(running) - len(decoded)
                plan.lower_budget(sum(decoded) + max(self.prefill_limit, num_prompts))
        grow(plan, [request for request in running if request not in outranked] if outranked else running)
        admit_in_turn(plan, outranked, grow, admit)
        plan.num_mixed_prompt_tokens = plan.initial_budget - plan.budget - sum(decoded) if decoded else 0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Adjust the limit. The limit grows only if prompts could have used more budget."""
        if not self._step_s or plan.num_mixed_prompt_tokens <= 0:
            return
        change = min(max(self._step_s / seconds, self._SHRINK), self._GROW) if seconds > 0 else self._GROW
        if change < 1 or plan.is_short:
            self._limit = min(max(change * self._limit, self._least), self._most)


class PrefillFirstBatching:
    """Fills a step with prompts, or with decodes if no prompt can start or continue."""

    prefill_limit = 0

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """See `Batching`."""
        grow(plan, [request for request in running if is_prefill(request) and request not in outranked])
        admit_in_turn(plan, outranked, grow, admit)
        if not (plan.num_tokens or plan.has_admitted):
            grow(plan, [request for request in running if is_decode(request)])

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """See `Batching`."""


def admit_in_turn(plan: StepPlan, outranked: list[Request], grow: Grow, admit: Admit) -> None:
    """Admit waiting requests and schedule the running prompts in `outranked`, by importance.

    If one of these prompts gets no tokens, no further request is admitted. The later prompts can still get tokens.

    outranked: Running prompts that are less important than a waiting request.
    """
    for index, request in enumerate(outranked):
        admit(plan, request)
        grow(plan, [request])
        if request.request_id not in plan.num_tokens:
            grow(plan, outranked[index + 1 :])
            return
    admit(plan, None)


def create_batching(config: ResolvedSchedulerConfig) -> Batching:
    """Create the rule for `config.batching`."""
    if config.batching is BatchingMode.PREFILL_FIRST:
        return PrefillFirstBatching()
    whole, step_s = config.max_num_batched_tokens, (config.mixed_step_ms or 0.0) / 1000
    most = config.max_num_mixed_prefill_tokens or (whole if step_s else 0)
    return MixedBatching(most, min(most, max(whole // 8, 1)), step_s)
