"""Steps in flight of a simulated world: they are collected in order, and computed early or late."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.request import RequestStatus

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from octavo.data.model_output import ModelOutput
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput
    from simulation.hash_model import HashWorker
    from simulation.store import SimulatedStore
    from simulation.world import Sharing

EXPECTED_TOKEN = -7


@dataclass(slots=True)
class Submitted:
    """A step in flight. free: blocks of each KV group, and host blocks, that had no holder before it was decided.

    requests: the requests of the step, each with its number of preemptions at that time.
    """

    scheduled: SchedulerOutput
    start: float
    sharing: Sharing
    free: tuple[list[list[int]], list[list[int]]]
    requests: dict[str, tuple[Request, int]]
    result: ModelOutput | None = None

    def alive(self) -> list[Request]:
        """Return the requests that still wait for the result of this step."""
        return [
            request
            for request, num_preemptions in self.requests.values()
            if request.status is RequestStatus.RUNNING and request.num_preemptions == num_preemptions
        ]


@dataclass(slots=True)
class Pipeline:
    """Passes steps to a worker and to a store, when they are submitted or when their results are needed."""

    worker: HashWorker
    store: SimulatedStore
    rng: random.Random
    steps: deque[Submitted] = field(default_factory=deque)

    def submit(self, step: Submitted) -> None:
        """Add a step; half of the steps are computed before the next decision."""
        self.steps.append(step)
        if self.rng.random() < 0.5:
            self.run(step)

    def run(self, last: Submitted) -> ModelOutput:
        """Compute all steps up to `last`; return its result."""
        for step in self.steps:
            if step.result is None:
                self.worker.poison(*step.free)
                step.result = self.worker.execute(step.scheduled)
                step.result.kv_transfers.extend(self.store.run(step.scheduled))
            if step is last:
                break
        if last.result is None:
            raise LookupError(f"step {last.scheduled.step} was not submitted")
        for step in self.steps:  # transfers wait for no step: all that ended are reported with the oldest result
            if step.result is not None and step is not last:
                last.result.kv_transfers.extend(step.result.kv_transfers)
                step.result.kv_transfers.clear()
        return last.result

    @contextmanager
    def expected(self) -> Iterator[set[str]]:
        """Change requests to their state after all steps but the newest; yield the requests that have ended by then."""
        ending, changed = set(), []
        for step in list(self.steps)[:-1]:
            counts = step.scheduled.num_scheduled_tokens
            for request in step.alive():
                request.num_computed_tokens += counts[request.request_id]
                is_due = request.num_computed_tokens >= len(request.sequence.token_ids)
                changed.append((request, counts[request.request_id], is_due))
                if is_due:
                    request.sequence.token_ids.append(EXPECTED_TOKEN)
                    if len(request.sequence.token_ids) >= request.max_total_tokens:
                        ending.add(request.request_id)
        try:
            yield ending
        finally:
            for request, count, is_due in changed:
                request.num_computed_tokens -= count
                if is_due:
                    request.sequence.token_ids.pop()
