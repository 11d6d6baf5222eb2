"""A step while it is decided: the remaining budget, the tokens of each request, and preempted requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import WaitReason
    from octavo.data.request import Request


@dataclass(slots=True)
class StepPlan:
    """A step while it is decided. Budgets are in tokens.

    whole_budget: the budget at the beginning. budget: the remaining budget.
    num_tokens: number of tokens of each request, in the order in which they were scheduled.
    prompt_room: number of prompt tokens that the step may still take (`max_batch_prefill_tokens`).
    of_prompts: ids of the requests that used prompt_room.
    surcharge: budget that each prompt used beyond its number of tokens.
    is_short: whether a request got no token, or fewer than it has to compute, because the budget was used up.
    beside_answers: budget that prompts used, if the step also has decodes; otherwise 0.
    held_up: why no further request may be admitted in this step; None if one may.
    has_admitted: whether the step admitted a request. Then it may preempt none.
    """

    whole_budget: int
    prompt_room: int
    budget: int = field(init=False)
    num_tokens: dict[str, int] = field(default_factory=dict)
    of_prompts: set[str] = field(default_factory=set)
    surcharge: dict[str, int] = field(default_factory=dict)
    preempted: dict[str, Request] = field(default_factory=dict)
    held_up: WaitReason | None = None
    has_admitted: bool = False
    is_short: bool = False
    beside_answers: int = 0

    def __post_init__(self) -> None:
        self.budget = self.whole_budget

    def lower_budget(self, whole_budget: int) -> None:
        """Lower the budget of a step. Call it before any tokens are given."""
        self.whole_budget = self.budget = min(whole_budget, self.whole_budget)

    @property
    def is_balanced(self) -> bool:
        """Whether given tokens, surcharges and the remaining budget add up to the whole budget."""
        return self.budget + sum(self.num_tokens.values()) + sum(self.surcharge.values()) == self.whole_budget

    def within_room(self, count: int, *, of_prompt: bool) -> int:
        """Return how many of `count` tokens the step may take under the limit on prompt tokens."""
        return min(count, self.prompt_room) if of_prompt else count

    def give(self, request: Request, count: int, surcharge: int = 0, *, of_prompt: bool = False) -> None:
        """Schedule `count` tokens of a request.

        surcharge: budget that they use beyond `count`. of_prompt: whether they are of a prompt, or are computed again
        after a preemption.
        """
        if of_prompt:
            self.prompt_room -= count
            self.of_prompts.add(request.request_id)
        self.num_tokens[request.request_id] = count
        self.budget -= count
        if surcharge:
            self.surcharge[request.request_id] = surcharge
            self.budget -= surcharge

    def take_back(self, request: Request) -> None:
        """Give a victim's tokens and surcharge back to the budget."""
        count = self.num_tokens.pop(request.request_id, 0)
        self.budget += count
        if request.request_id in self.of_prompts:
            self.prompt_room += count
        self.budget += self.surcharge.pop(request.request_id, 0)
