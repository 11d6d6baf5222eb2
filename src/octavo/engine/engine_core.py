"""The step: read this first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ExecutionError

if TYPE_CHECKING:
    from octavo.core.scheduler_interface import SchedulerInterface
    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineMetrics
    from octavo.data.recent_events import RecentEvents
    from octavo.engine.executor import Executor
    from octavo.outputs import EngineCoreOutput


class EngineCore:
    """A scheduler and an executor, one step at a time.

    metrics, recent: what reads the scheduler's events. capacity: what both were found to have room for.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        metrics: EngineMetrics,
        recent: RecentEvents,
        capacity: EngineCapacity,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.metrics = metrics
        self.recent = recent
        self.capacity = capacity
        self._undelivered: list[EngineCoreOutput] = []

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, compute, take the result in; return the news of every request that has any.

        A step that the executor could not do ends its requests with an error, frees their blocks and leaves the rest.
        """
        scheduled = self.scheduler.schedule()
        if scheduled.is_empty:
            return self._take_undelivered()
        try:
            self.executor.submit(scheduled)
            result = self.executor.collect()
        except ExecutionError as error:
            return self._take_undelivered() + self.scheduler.fail_step(scheduled, str(error))
        except BaseException:  # an interrupt: nobody knows how far the worker came
            self._undelivered += self.scheduler.fail_step(scheduled, "the step was interrupted")
            raise
        outputs = self._take_undelivered() + self.scheduler.update_from_output(scheduled, result)
        if result.draft_token_ids:
            self.scheduler.update_draft_token_ids(result.draft_token_ids)
        return outputs

    def has_work(self) -> bool:
        """Whether another step is needed."""
        return bool(self._undelivered) or self.scheduler.has_work()

    def _take_undelivered(self) -> list[EngineCoreOutput]:
        """Return the endings that an interrupt kept from being told."""
        outputs, self._undelivered = self._undelivered, []
        return outputs
