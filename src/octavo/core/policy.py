"""The questions the scheduler asks: how many tokens, and who is evicted. Pure functions and small objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.config import SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.request import Request


def num_tokens_to_schedule(
    num_remaining: int, budget: int, *, threshold: int, may_be_cut: bool, whole_budget: int
) -> int:
    """How many of `num_remaining` tokens a request gets of what is left of a step's budget; 0 when it has to wait.

    threshold: most tokens one request gets in a step, 0 for no such limit. A request that may not be cut waits until
    it fits whole, unless even an empty step (`whole_budget`) could not take it.
    """
    if threshold:
        num_remaining = min(num_remaining, threshold)
    if num_remaining <= budget:
        return num_remaining
    if not may_be_cut and num_remaining <= whole_budget:
        return 0
    return max(budget, 0)


class VictimPolicy(Protocol):
    """Chooses who gives up its blocks when there are too few."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Return the least important of the running requests; there is at least one."""
        ...


class LatestArrival:
    """First come, first served: the latest arrival falls first, the oldest never while another runs."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Return the latest arrival."""
        return max(running, key=lambda request: request.arrival_index)


class LowestPriority:
    """The highest priority number falls first, the latest arrival among equals."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Return the least important."""
        return max(running, key=lambda request: (request.priority, request.arrival_index))


def create_victim_policy(policy: SchedulingPolicy) -> VictimPolicy:
    """Create the rule that goes with a queue's order."""
    return LowestPriority() if policy is SchedulingPolicy.PRIORITY else LatestArrival()
