"""One step of the engine."""

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
    from octavo.kv_events import KVEventLog
    from octavo.outputs import EngineCoreOutput


class EngineCore:
    """Runs a scheduler's steps on an executor. The next step may be scheduled while a step runs."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        metrics: EngineMetrics,
        recent: RecentEvents,
        capacity: EngineCapacity,
        kv_events: KVEventLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.metrics = metrics
        self.recent = recent
        self.capacity = capacity
        self.kv_events = kv_events
        self._undelivered: list[EngineCoreOutput] = []

    def step(self) -> list[EngineCoreOutput]:
        """Submit the next step, wait for the oldest step's result, and return new outputs.

        If a step fails, its requests end with an error.
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
        except BaseException:  # the worker's state is unknown
            self._undelivered += self._fail("the step was interrupted")
            raise
        return self._take_undelivered() + scheduler.update_from_output(scheduled, result)

    def _submit_next(self) -> None:
        scheduled = self.scheduler.schedule()
        if not scheduled.is_empty:
            self.executor.submit(scheduled)

    def _fail(self, message: str) -> list[EngineCoreOutput]:
        self.executor.abandon()
        scheduled = self.scheduler.in_flight
        return [] if scheduled is None else self.scheduler.fail_step(scheduled, message)

    def has_work(self) -> bool:
        """Return True if another step is needed."""
        return bool(self._undelivered) or self.scheduler.has_work()

    def finish_transfers(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Run steps until the KV of ended requests is saved.

        Returns early if a step fails, a request is unfinished, or `may_go_on` returns False. A save that hangs ends
        after `kv_transfer_timeout_s`.
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

    def shutdown(self) -> None:
        """End the executor and the publishing of events."""
        self.executor.shutdown()
        if self.kv_events is not None:
            self.kv_events.close()

    def _take_undelivered(self) -> list[EngineCoreOutput]:
        outputs, self._undelivered = self._undelivered, []
        return outputs
