"""The step: read this first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.core.scheduler_interface import SchedulerInterface
    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineMetrics
    from octavo.data.recent_events import RecentEvents
    from octavo.engine.executor import Executor
    from octavo.outputs import EngineCoreOutput


class EngineCore:
    """A scheduler and an executor: one step at a time, or the next one decided while one is computed.

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
        """Schedule, compute, take the oldest result in; return the news of every request that has any.

        A step that the executor could not do ends its requests with an error, frees their blocks and leaves the rest.
        """
        scheduler = self.scheduler
        try:
            if scheduler.in_flight is None:
                self._submit_next()
            if scheduler.may_look_ahead():
                self._submit_next()
            scheduled = scheduler.in_flight
            if scheduled is None:
                return self._take_undelivered()
            result = self.executor.collect()
        except ExecutionError as error:
            return self._take_undelivered() + self._fail(str(error))
        except BaseException:  # an interrupt: nobody knows how far the worker came
            self._undelivered += self._fail("the step was interrupted")
            raise
        return self._take_undelivered() + scheduler.update_from_output(scheduled, result)

    def _submit_next(self) -> None:
        """Decide a step and hand it over, if there is anything to do."""
        scheduled = self.scheduler.schedule()
        if not scheduled.is_empty:
            self.executor.submit(scheduled)

    def _fail(self, message: str) -> list[EngineCoreOutput]:
        """Give up what was submitted; return the news of the requests that end with the oldest of it."""
        self.executor.abandon()
        scheduled = self.scheduler.in_flight
        return [] if scheduled is None else self.scheduler.fail_step(scheduled, message)

    def has_work(self) -> bool:
        """Whether another step is needed."""
        return bool(self._undelivered) or self.scheduler.has_work()

    def finish_transfers(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Step until the KV of ended requests is saved, if no request is unfinished.

        A save that hangs ends by `kv_transfer_timeout_s`. A failed step ends the wait.

        Args:
            may_go_on: asked before each step; False ends the wait.
        """
        scheduler, stats = self.scheduler, self.metrics.stats
        news: list[EngineCoreOutput] = []
        num_failed = stats.num_failed_steps
        try:
            while scheduler.get_num_transfers() and not scheduler.get_num_unfinished_requests():
                if stats.num_failed_steps > num_failed or not may_go_on():
                    break
                news += self.step()
        finally:
            self._undelivered += news

    def _take_undelivered(self) -> list[EngineCoreOutput]:
        """Return the endings that an interrupt kept from being told."""
        outputs, self._undelivered = self._undelivered, []
        return outputs
