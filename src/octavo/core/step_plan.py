"""A step's plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import WaitReason
    from octavo.data.request import Request


@dataclass(slots=True)
class StepPlan:
    """A step's remaining token budget, and each request's tokens in scheduling order.

    prompt_budget: Remaining number of prompt tokens.
    num_mixed_prompt_tokens: Budget that prompts use in a step that also decodes.
    """

    initial_budget: int
    prompt_budget: int
    budget: int = field(init=False)
    num_tokens: dict[str, int] = field(default_factory=dict)
    of_prompts: set[str] = field(default_factory=set)
    surcharge: dict[str, int] = field(default_factory=dict)  # budget that a prompt uses beyond its number of tokens
    preempted: dict[str, Request] = field(default_factory=dict)
    held_up: WaitReason | None = None  # why no further request may be admitted
    has_admitted: bool = False  # if True, the step must not preempt
    is_short: bool = False  # True if requests could use more budget
    num_mixed_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.budget = self.initial_budget

    def lower_budget(self, initial_budget: int) -> None:
        """Lower the budget. Must be called before the first `give`."""
        self.initial_budget = self.budget = min(initial_budget, self.initial_budget)

    @property
    def is_balanced(self) -> bool:
        """Whether budget, scheduled tokens and surcharges add up to the initial budget."""
        return self.budget + sum(self.num_tokens.values()) + sum(self.surcharge.values()) == self.initial_budget

    def within_prompt_budget(self, count: int, *, of_prompt: bool) -> int:
        """Return how many of `count` tokens fit the prompt budget."""
        return min(count, self.prompt_budget) if of_prompt else count

    def give(self, request: Request, count: int, surcharge: int = 0, *, of_prompt: bool = False) -> None:
        """Schedule `count` tokens of a request. Reduce the budget by `count` + `surcharge`.

        of_prompt: True if the tokens also reduce the prompt budget.
        """
        if of_prompt:
            self.prompt_budget -= count
            self.of_prompts.add(request.request_id)
        self.num_tokens[request.request_id] = count
        self.budget -= count
        if surcharge:
            self.surcharge[request.request_id] = surcharge
            self.budget -= surcharge

    def take_back(self, request: Request) -> None:
        """Undo `give` for a preempted request."""
        count = self.num_tokens.pop(request.request_id, 0)
        self.budget += count
        if request.request_id in self.of_prompts:
            self.prompt_budget += count
        self.budget += self.surcharge.pop(request.request_id, 0)
