"""Steps that were decided and whose results are not in yet.

The worker computes them in the order in which they were decided. So what a later one reads or writes in blocks stands
behind what an earlier one does, even where these blocks had another owner in between.

Usually there is one. With `async_scheduling` the next is decided while that one computes: it is taken as it is expected
to come, each request that is due a token having got one that is not known yet. Only what can be foreseen is decided so:
nobody loses blocks, and nobody goes on who may get no token, or more than one. Who ends by a token that nobody foresaw
has one row computed in vain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.core.step_plan import StepPlan
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput

UNKNOWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was decided. start: when, in seconds of the core's clock.

    left: ids of requests that ended since: what comes of them is for nobody, even if others have the ids.
    """

    scheduled: SchedulerOutput
    plan: StepPlan
    start: float
    left: set[str] = field(default_factory=set)

    def requests(self, requests: Mapping[str, Request]) -> list[Request]:
        """Return those of the requests that are still to get what was computed."""
        return [requests[name] for name in self.scheduled.num_scheduled_tokens if name not in self.left]

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Whether what comes of it is known but for the tokens, one for each who is due any, and somebody goes on.

        Drafts that it had no room for are of no use behind a token that is not known.
        """
        goes_on, counts = False, self.scheduled.num_scheduled_tokens
        for request in self.requests(requests):
            if request.awaits_results or request.spec_token_ids:
                return False
            num_known = len(request.sequence.token_ids)
            is_due = request.num_computed_tokens + counts[request.request_id] >= num_known
            goes_on = goes_on or not is_due or num_known + 1 < request.max_total_tokens
        return goes_on


class StepsInFlight:
    """At most two, the oldest first. `steps` is for others to read."""

    def __init__(self) -> None:
        self.steps: deque[StepInFlight] = deque()
        self._expected: list[tuple[Request, int, bool]] = []

    def take(self, number: int) -> StepInFlight | None:
        """Take out the oldest step, if this is its number; else None: a result of it is late, or came twice."""
        if self.steps and self.steps[0].scheduled.step == number:
            return self.steps.popleft()
        return None

    def take_all(self) -> list[StepInFlight]:
        """Take out all: they are not done."""
        steps = list(self.steps)
        self.steps.clear()
        return steps

    def leave(self, request_id: str) -> None:
        """Take note that a request ended."""
        for step in self.steps:
            step.left.add(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a step computes a request of this id."""
        return any(request_id in step.scheduled.num_scheduled_tokens for step in self.steps)

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Whether there is just one, and what comes of it can be foreseen: so the next one may be decided."""
        return len(self.steps) == 1 and self.steps[0].is_foreseeable(requests)

    def expect(self, requests: Mapping[str, Request]) -> set[str]:
        """Let requests look as if all results were in; return who has ended then. `forget` takes it back.

        Mutates their numbers of computed tokens and their tokens: one that is to come is `UNKNOWN_TOKEN`.
        """
        ending: set[str] = set()
        for step in self.steps:
            for request in step.requests(requests):
                count, token_ids = step.scheduled.num_scheduled_tokens[request.request_id], request.sequence.token_ids
                request.num_computed_tokens += count
                is_due = request.num_computed_tokens >= len(token_ids)
                self._expected.append((request, count, is_due))
                if is_due:
                    token_ids.append(UNKNOWN_TOKEN)
                    if len(token_ids) >= request.max_total_tokens:
                        ending.add(request.request_id)
        return ending

    def forget(self) -> None:
        """Let requests look again as they do by the results that are in."""
        for request, count, is_due in self._expected:
            request.num_computed_tokens -= count
            if is_due:
                request.sequence.token_ids.pop()
        self._expected.clear()
