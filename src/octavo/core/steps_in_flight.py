"""Steps that were decided and whose results are not in yet.

The worker computes them in the order in which they were decided. So a later step reads and writes blocks after an
earlier one, even if the blocks had another owner in between.

Usually there is one. With `async_scheduling` the next step is decided while that one is computed, as if its result were
in: each request that is due a token has got one that is not known yet. Such a step is decided only if that can be
foreseen: no request loses blocks, and no request goes on that may get no token or several. For a request that ends with
an unforeseen token, one row is computed in vain.
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

    left: ids of requests that ended since. Their results are dropped, even if other requests have the ids now.
    """

    scheduled: SchedulerOutput
    plan: StepPlan
    start: float
    left: set[str] = field(default_factory=set)

    def requests(self, requests: Mapping[str, Request]) -> list[Request]:
        """Return the requests of the step that have not ended since."""
        return [requests[name] for name in self.scheduled.num_scheduled_tokens if name not in self.left]

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Return whether its result is known except for the tokens, one for each request that is due any.

        At least one request must go on. Drafts that the step had no room for are useless after an unknown token.
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
    """At most two steps, the oldest first. `steps` is for others to read."""

    def __init__(self) -> None:
        self.steps: deque[StepInFlight] = deque()
        self._expected: list[tuple[Request, int, bool]] = []

    def take(self, number: int) -> StepInFlight | None:
        """Remove and return the oldest step if this is its number; otherwise None: the result is late or came twice."""
        if self.steps and self.steps[0].scheduled.step == number:
            return self.steps.popleft()
        return None

    def take_all(self) -> list[StepInFlight]:
        """Remove and return all steps: they are not computed."""
        steps = list(self.steps)
        self.steps.clear()
        return steps

    def leave(self, request_id: str) -> None:
        """Note that a request ended."""
        for step in self.steps:
            step.left.add(request_id)

    def has(self, request_id: str) -> bool:
        """Return whether a step computes a request with this id."""
        return any(request_id in step.scheduled.num_scheduled_tokens for step in self.steps)

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Return whether there is one step whose result can be foreseen, so that the next one may be decided."""
        return len(self.steps) == 1 and self.steps[0].is_foreseeable(requests)

    def expect(self, requests: Mapping[str, Request]) -> set[str]:
        """Advance requests as if all results were in. Returns the ids of those that end then. `forget` undoes it.

        Mutates their numbers of computed tokens and their tokens: a token that is not known yet is `UNKNOWN_TOKEN`.
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
        """Set requests back to the results that are in."""
        for request, count, is_due in self._expected:
            request.num_computed_tokens -= count
            if is_due:
                request.sequence.token_ids.pop()
        self._expected.clear()
