"""The scheduler's rules: how many tokens, the order of requests, which one is preempted, what shares a step.

They are pure functions and small objects, chosen once from the configuration.
"""

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

    from octavo.config import SchedulerConfig
    from octavo.core.step_plan import StepPlan
    from octavo.data.request import Request

    Grow: TypeAlias = Callable[[StepPlan, Sequence[Request]], None]
    Admit: TypeAlias = Callable[[StepPlan, Request | None], None]

Rank = tuple[float, ...]


def num_tokens_to_schedule(
    num_remaining: int, budget: int, *, threshold: int, may_be_cut: bool, whole_budget: int
) -> int:
    """Return how many of `num_remaining` tokens a request gets of a step's remaining budget; 0 if it has to wait.

    A request that may not be cut waits until it fits whole, unless even an empty step (`whole_budget`) is too small.

    budget: in tokens of this request (`num_tokens_within`). threshold: the most tokens that one request gets in a step;
    0 for no such limit.
    """
    if threshold:
        num_remaining = min(num_remaining, threshold)
    if num_remaining <= budget:
        return num_remaining
    if not may_be_cut and num_remaining <= whole_budget:
        return 0
    return max(budget, 0)


class PromptCost:
    """What a prompt's tokens take of a step's budget. Later tokens of a prompt cost more: they attend to all before.

    Each token of a chunk counts as 1 + attention_cost_tokens * position / 1000, where position is that of the chunk's
    first token. So the steps of a long prompt take equally long from its beginning to its end.
    """

    def __init__(self, attention_cost_tokens: float) -> None:
        self._per_position = attention_cost_tokens / 1000

    def num_tokens_within(self, budget: int, position: int) -> int:
        """Return how long a chunk may be that begins at `position`: at least one token, of any budget above 0."""
        if budget <= 0 or not self._per_position:
            return budget
        return max(int(budget / (1 + self._per_position * position)), 1)

    def surcharge(self, position: int, count: int, budget: int) -> int:
        """Return what a chunk takes beyond `count` of the budget that it was cut for."""
        return min(math.ceil(count * self._per_position * position), budget - count)


PLAIN_COST = PromptCost(0.0)


# --- order ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policy:
    """The order in which requests wait, and the present rank of each: a smaller one is more important.

    counters: tokens served to each tenant; kept under every policy, read by `fair`. ranks_are_fixed: a request keeps
    its rank. False if ranks depend on what tenants were served.
    """

    waiting: RequestQueue
    rank: Callable[[Request], Rank]
    counters: ServiceCounters
    ranks_are_fixed: bool


def create_policy(config: SchedulerConfig) -> Policy:
    """Create the order that `config.policy` names, with its queue."""
    counters = ServiceCounters(config.fair_input_weight, config.fair_output_weight)
    ranks: dict[SchedulingPolicy, Callable[[Request], Rank]] = {
        SchedulingPolicy.FCFS: lambda r: (r.arrival_index,),
        SchedulingPolicy.PRIORITY: lambda r: rank_by_priority(r, config.ageing_s),
        SchedulingPolicy.DEADLINE: lambda r: rank_by_deadline(r, config.ageing_s),
        SchedulingPolicy.FAIR: lambda r: (counters.served(r.tenant), *rank_by_priority(r, config.ageing_s)),
    }
    rank = ranks[config.policy]
    if config.policy is SchedulingPolicy.FAIR:
        queue = create_request_queue(config.policy, ranks[SchedulingPolicy.PRIORITY], counters)
    else:
        queue = create_request_queue(config.policy, rank)
    return Policy(queue, rank, counters, ranks_are_fixed=config.policy is not SchedulingPolicy.FAIR)


def create_request_queue(
    policy: SchedulingPolicy,
    rank: Callable[[Request], Rank] | None = None,
    counters: ServiceCounters | None = None,
) -> RequestQueue:
    """Create the queue in which requests wait under `policy`.

    rank: the order of requests under `priority` and `deadline`, and of one tenant's requests under `fair`.
    counters: the order of tenants.
    """
    if policy is SchedulingPolicy.FAIR:
        return FairRequestQueue(counters, rank)
    if policy is SchedulingPolicy.FCFS:
        return FCFSRequestQueue()
    return PriorityRequestQueue(rank)


def rank_by_priority(request: Request, ageing_s: float | None) -> Rank:
    """Rank lower numbers first, then earlier arrivals. A priority falls by one every `ageing_s` seconds of waiting.

    All requests age alike, so neither their order nor their ranks change: p - (now - arrival) / ageing_s is
    p + arrival / ageing_s, less a number that is the same for all.
    """
    if ageing_s is None:
        return (request.priority, request.arrival_index)
    if ageing_s == 0:
        return (request.arrival_index,)
    return (request.priority + request.arrival_time / ageing_s, request.arrival_index)


def rank_by_deadline(request: Request, ageing_s: float | None) -> Rank:
    """Rank the earliest deadline first, then arrival. A later or missing one counts as `ageing_s` after the arrival."""
    deadline = math.inf if request.deadline is None else request.deadline
    horizon = math.inf if ageing_s is None else request.arrival_time + ageing_s
    return (min(deadline, horizon), request.arrival_index)


def choose_victim(running: Sequence[Request], rank: Callable[[Request], Rank], max_preemptions: int) -> Request | None:
    """Return the least important running request that may be preempted, or None.

    The most important one is never preempted, and no request more than `max_preemptions` times.
    """
    first = min(running, key=rank)
    candidates = [r for r in running if r is not first and r.num_preemptions < max_preemptions]
    return max(candidates, key=rank) if candidates else None


def should_swap(config: SchedulerConfig, num_tokens: int, num_blocks: int) -> bool:
    """Return whether swapping out a victim of `num_tokens` in `num_blocks` is better than computing it again."""
    if config.preemption is PreemptionMode.AUTO:
        return num_blocks * config.swap_block_cost_tokens < num_tokens
    return config.preemption is PreemptionMode.SWAP and num_blocks > 0


# --- what shares a step -----------------------------------------------------------------------------------------------


def is_prefill(request: Request, num_computed_tokens: int | None = None) -> bool:
    """Return whether more than the newest generated token of a request is still to be computed.

    num_computed_tokens: as if so many were computed; by default the request's own.
    """
    sequence = request.sequence
    num_computed = request.num_computed_tokens if num_computed_tokens is None else num_computed_tokens
    return len(sequence.token_ids) - num_computed > 1 or not sequence.num_output_tokens


def is_decode(request: Request) -> bool:
    """Return whether only the newest generated token, and drafts after it, are to be computed."""
    return not is_prefill(request)


class Batching(Protocol):
    """The order in which a step is filled: grow(plan, requests) for running, admit(plan, before) for waiting ones."""

    @property
    def prefill_limit(self) -> int:
        """What prompts may take of the budget of the next step in which others decode, 0 for all that is left."""
        ...

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """Fill the plan of one step.

        outranked: running prompts that more important waiting requests precede, in order of rank.
        """
        ...

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the duration of a step."""
        ...


class MixedBatching:
    """Serves running requests, then waiting ones: prompts and answers share steps.

    The readers of answers wait for the whole step. So prompts get at most `most` tokens of one (0: all that is left).
    With `step_s` they get as many as let the step end within about so many seconds, but at least `least`.
    Sarathi-Serve (Agrawal et al. 2024) chooses such a budget by profiling; here the limit follows measured steps.
    """

    _SHRINK, _GROW = 0.5, 1.25  # largest changes by one step, which may be slow or fast for other reasons

    def __init__(self, most: int, least: int = 0, step_s: float = 0.0) -> None:
        self._most, self._least, self._step_s = float(most), float(least), step_s
        self._limit = self._least if step_s else self._most

    @property
    def prefill_limit(self) -> int:
        """What prompts may take of the budget of the next step in which others decode, 0 for all that is left."""
        return int(self._limit)

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """Serve running requests first."""
        decoded: list[int] = []
        if self._limit:
            decoded = [request.num_tokens - request.num_computed_tokens for request in running if is_decode(request)]
            if (
                decoded
            ):  # at least a token for each running prompt: otherwise they would take those of decodes after them
                num_prompts = len(running) - len(decoded)
                plan.lower_budget(sum(decoded) + max(self.prefill_limit, num_prompts))
        grow(plan, [request for request in running if request not in outranked] if outranked else running)
        admit_in_turn(plan, outranked, grow, admit)
        plan.beside_answers = plan.whole_budget - plan.budget - sum(decoded) if decoded else 0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Follow steps that prompts and answers share. The limit grows only after a step too short for its prompts."""
        if not self._step_s or plan.beside_answers <= 0:
            return
        change = min(max(self._step_s / seconds, self._SHRINK), self._GROW) if seconds > 0 else self._GROW
        if change < 1 or plan.is_short:
            self._limit = min(max(change * self._limit, self._least), self._most)


class PrefillFirstBatching:
    """Serves only prompts while there are any, then only answers: no step has both."""

    prefill_limit = 0

    def fill(self, plan: StepPlan, running: list[Request], outranked: list[Request], grow: Grow, admit: Admit) -> None:
        """Serve prompts, or answers if there is no prompt."""
        grow(plan, [request for request in running if is_prefill(request) and request not in outranked])
        admit_in_turn(plan, outranked, grow, admit)
        if not (plan.num_tokens or plan.has_admitted):
            grow(plan, [request for request in running if is_decode(request)])

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn nothing: no answer waits for a prompt of the same step."""


def admit_in_turn(plan: StepPlan, outranked: list[Request], grow: Grow, admit: Admit) -> None:
    """Admit waiting requests, but serve each outranked prompt before less important ones.

    After a prompt that finds no block, none is admitted. Running requests go on: the prompt may wait for their blocks.
    """
    for index, request in enumerate(outranked):
        admit(plan, request)
        grow(plan, [request])
        if request.request_id not in plan.num_tokens:
            grow(plan, outranked[index + 1 :])
            return
    admit(plan, None)


def create_batching(config: SchedulerConfig) -> Batching:
    """Create the rule that `config.batching` names."""
    if config.batching is BatchingMode.PREFILL_FIRST:
        return PrefillFirstBatching()
    whole, step_s = config.max_num_batched_tokens, (config.mixed_step_ms or 0.0) / 1000
    most = config.max_num_mixed_prefill_tokens or (whole if step_s else 0)
    return MixedBatching(most, min(most, max(whole // 8, 1)), step_s)
