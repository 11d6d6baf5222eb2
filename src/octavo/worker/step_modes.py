"""How a worker's steps are computed: as they are submitted, by a thread, or launched on a device that does them later.

All modes compute steps in the order in which they come, and behind one that failed none until `abandon`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from octavo.data.model_output import ModelOutput
from octavo.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.worker.launched_step import LaunchedStep
    from octavo.worker.worker import Worker

logger = logging.getLogger(__name__)
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class StepMode(ABC):
    """One way. `submit` begins a step; `collect` waits for the oldest one, as often as there were submitted."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._failed: int | None = None  # the first step that failed

    @abstractmethod
    def submit(self, scheduled: SchedulerOutput) -> None:
        """Begin a step."""

    @abstractmethod
    def collect(self) -> ModelOutput | ExecutionError:
        """Return the result of the oldest step, or what it failed with."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop all steps that were not collected; none of them is under way behind this."""

    def shutdown(self) -> None:
        """End threads, and drop the reference to the worker; a second call changes nothing."""
        self.__dict__.pop("worker", None)

    def _run(self, step: int, part: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT | ExecutionError:
        """Do a part of a step, unless one before it failed. Return what it gave, or why there is nothing."""
        if self._failed is not None and step > self._failed:
            return ExecutionError("the step before failed")
        try:
            return part(argument)
        except Exception as error:  # whatever a kernel or torch raises ends this step's requests, not the engine
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
        """Compute it."""
        self._results.append(self._run(scheduled.step, self.worker.execute, scheduled))

    def collect(self) -> ModelOutput | ExecutionError:
        """Return what came of it."""
        return self._results.popleft()

    def abandon(self) -> None:
        """Drop results."""
        self._results.clear()
        self._failed = None


class ComputesInBackground(StepMode):
    """A thread computes steps, one after the other: for a CPU, on which launching is computing."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._thread = ThreadPoolExecutor(1, "octavo-worker")
        self._results: deque[Future[ModelOutput | ExecutionError]] = deque()

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Leave it to the thread."""
        self._results.append(self._thread.submit(self._run, scheduled.step, self.worker.execute, scheduled))

    def collect(self) -> ModelOutput | ExecutionError:
        """Wait for the thread."""
        result = self._results[0].result()
        self._results.popleft()
        return result

    def abandon(self) -> None:
        """Wait for the step that the thread computes; those behind it do not begin."""
        self._failed = -1  # what the thread begins before it is cancelled is not run
        try:
            wait([result for result in self._results if not result.cancel()])
        finally:
            self._results.clear()
            self._failed = None

    def shutdown(self) -> None:
        """End the thread, and drop the worker."""
        self._thread.shutdown(cancel_futures=True)
        super().shutdown()


class LaunchesAhead(StepMode):
    """`submit` launches, `collect` waits for the device, which has the next step before the oldest one is collected.

    Unless a step needs the tokens of those before it on the host: then these are collected before it is launched.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._steps: deque[tuple[int, LaunchedStep | ModelOutput | ExecutionError]] = deque()  # by their numbers

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Launch it."""
        if self._steps and self.worker.needs_sampled_tokens(scheduled):
            for index in range(len(self._steps)):
                self._finish(index)
        self._steps.append((scheduled.step, self._run(scheduled.step, self.worker.launch, scheduled)))

    def collect(self) -> ModelOutput | ExecutionError:
        """Wait for the device, unless the step is collected already."""
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
        """Wait until the device has done all that was launched."""
        try:
            self.worker.wait_idle()
        except Exception:  # of steps that nobody wants any more
            logger.exception("the device failed in steps that were given up")
        finally:
            self._steps.clear()
            self._failed = None
