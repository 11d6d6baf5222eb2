"""Ways to overlap steps."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from octavo.data.model_output import ModelOutput
from octavo.errors import EngineDeadError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.worker.launched_step import LaunchedStep
    from octavo.worker.worker import Worker

logger = logging.getLogger(__name__)
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class StepMode(ABC):
    """Computes steps in order, but none between a failed step and `abandon`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._failed: int | None = None

    @abstractmethod
    def submit(self, scheduled: SchedulerOutput) -> None:
        """Begin a step."""

    @abstractmethod
    def collect(self) -> ModelOutput | ExecutionError:
        """Return the oldest result."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop uncollected steps. Waits for running ones."""

    def shutdown(self) -> None:
        """Close and drop the worker."""
        worker: Worker | None = self.__dict__.pop("worker", None)
        if worker is not None:
            worker.close()

    def _run(self, step: int, part: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT | ExecutionError:
        if self._failed is not None and step > self._failed:
            return ExecutionError("the previous step failed")
        try:
            return part(argument)
        except EngineDeadError:
            self._failed = step
            raise
        except Exception as error:  # fails only this step's requests
            self._failed = step
            logger.exception("step %d failed", step)
            return ExecutionError(f"the model failed in this step: {type(error).__name__}")
        except BaseException:
            self._failed = step
            raise


class ComputesAtOnce(StepMode):
    """`submit` computes the step."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._results: deque[ModelOutput | ExecutionError] = deque()

    def submit(self, scheduled: SchedulerOutput) -> None:
        """See `StepMode`."""
        self._results.append(self._run(scheduled.step, self.worker.execute, scheduled))

    def collect(self) -> ModelOutput | ExecutionError:
        """See `StepMode`."""
        return self._results.popleft()

    def abandon(self) -> None:
        """See `StepMode`."""
        self._results.clear()
        self._failed = None


class ComputesInBackground(StepMode):
    """Computes steps in a thread."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._thread = ThreadPoolExecutor(1, "octavo-worker")
        self._results: deque[Future[ModelOutput | ExecutionError]] = deque()

    def submit(self, scheduled: SchedulerOutput) -> None:
        """See `StepMode`."""
        self._results.append(self._thread.submit(self._run, scheduled.step, self.worker.execute, scheduled))

    def collect(self) -> ModelOutput | ExecutionError:
        """Wait for the thread."""
        result = self._results[0].result()
        self._results.popleft()
        return result

    def abandon(self) -> None:
        """Wait for the thread."""
        self._failed = -1  # skips steps that are not yet cancelled
        try:
            wait([result for result in self._results if not result.cancel()])
        finally:
            self._results.clear()
            self._failed = None

    def shutdown(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
        super().shutdown()


class LaunchesAhead(StepMode):
    """`submit` launches a step, and `collect` waits for the device.

    If a step needs earlier tokens on the host, earlier steps are collected first.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._steps: deque[tuple[int, LaunchedStep | ModelOutput | ExecutionError]] = deque()

    def submit(self, scheduled: SchedulerOutput) -> None:
        """See `StepMode`."""
        if self._steps and self.worker.needs_sampled_tokens(scheduled):
            for index in range(len(self._steps)):
                self._finish(index)
        self._steps.append((scheduled.step, self._run(scheduled.step, self.worker.launch, scheduled)))

    def collect(self) -> ModelOutput | ExecutionError:
        """See `StepMode`."""
        result = self._finish(0)
        self._steps.popleft()
        return result

    def _finish(self, index: int) -> ModelOutput | ExecutionError:
        number, launched = self._steps[index]
        if isinstance(launched, ModelOutput | ExecutionError):
            return launched
        result = self._run(number, self.worker.collect, launched)
        self._steps[index] = number, result
        return result

    def abandon(self) -> None:
        """Wait until idle."""
        try:
            self.worker.wait_idle()
        except Exception:
            logger.exception("the device failed in steps that were abandoned")
        finally:
            self._steps.clear()
            self._failed = None
