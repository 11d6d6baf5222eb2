"""Scheduled steps without a result.

With `async_scheduling`, a step is scheduled before the previous step has a result:
- Placeholders replace unknown tokens.
- No request is preempted, and each decoding request gets exactly one token.
- If the previous step ends a request, the request's next token is discarded.
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
    """A scheduled step.

    ended_ids: Ids of requests that ended after the step was scheduled. Results under these ids are dropped. New
    requests may reuse the ids.
    """

    scheduled: SchedulerOutput
    plan: StepPlan
    start: float
    ended_ids: set[str] = field(default_factory=set)

    def requests(self, requests: Mapping[str, Request]) -> list[Request]:
        """Return the step's requests that have not ended."""
        return [requests[name] for name in self.scheduled.num_scheduled_tokens if name not in self.ended_ids]

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Return True if the next step has work and can be scheduled before this step has a result.

        Return False if a request has drafts or a grammar.
        """
        continues, counts = False, self.scheduled.num_scheduled_tokens
        for request in self.requests(requests):
            if request.awaits_results or request.spec_token_ids:
                return False
            num_known = len(request.sequence.token_ids)
            is_due = request.num_computed_tokens + counts[request.request_id] >= num_known
            continues = continues or not is_due or num_known + 1 < request.max_total_tokens
        return continues


class StepsInFlight:
    """At most two steps, the oldest first. Only the scheduler appends to `steps`."""

    def __init__(self) -> None:
        self.steps: deque[StepInFlight] = deque()
        self._expected: list[tuple[Request, int, bool]] = []

    def take(self, number: int) -> StepInFlight | None:
        """Remove and return the oldest step if it has this number."""
        if self.steps and self.steps[0].scheduled.step == number:
            return self.steps.popleft()
        return None

    def take_all(self) -> list[StepInFlight]:
        """Remove and return all steps."""
        steps = list(self.steps)
        self.steps.clear()
        return steps

    def leave(self, request_id: str) -> None:
        """Record a request's end."""
        for step in self.steps:
            step.ended_ids.add(request_id)

    def has(self, request_id: str) -> bool:
        """Return True if a step computes this request."""
        return any(request_id in step.scheduled.num_scheduled_tokens for step in self.steps)

    def is_foreseeable(self, requests: Mapping[str, Request]) -> bool:
        """Return True if one step is in flight and is foreseeable."""
        return len(self.steps) == 1 and self.steps[0].is_foreseeable(requests)

    def expect(self, requests: Mapping[str, Request]) -> set[str]:
        """Advance requests as if all steps had results. Return the ids of requests that reach their maximum length.

        Expected tokens are appended as `UNKNOWN_TOKEN`. `forget` undoes all changes.
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
        """Undo `expect`."""
        for request, count, is_due in self._expected:
            request.num_computed_tokens -= count
            if is_due:
                request.sequence.token_ids.pop()
        self._expected.clear()
