"""A step while it is being decided: budget left, who gets how much, who lost its blocks, what is fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.events import WaitReason
    from octavo.request import Request
    from octavo.scheduler_output import KVLoad


@dataclass(slots=True)
class StepPlan:
    """Budget is in tokens. `num_tokens` is in the order in which the rows of the batch will stand.

    held_up: why nobody may be admitted any more in this step. has_admitted: so nobody may be preempted in it.
    """

    budget: int
    num_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    kv_loads: list[KVLoad] = field(default_factory=list)
    preempted: dict[str, Request] = field(default_factory=dict)
    held_up: WaitReason | None = None
    has_admitted: bool = False

    def give(self, request: Request, count: int, block_ids: list[int]) -> None:
        """Schedule `count` tokens."""
        self.num_tokens[request.request_id] = count
        self.new_block_ids[request.request_id] = block_ids
        self.budget -= count

    def take_back(self, request: Request) -> None:
        """Return a victim's budget to the step."""
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)
