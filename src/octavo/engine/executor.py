"""The seam through which the engine reaches who computes a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.sampling_params import SamplingParams


class Executor(Protocol):
    """Computes steps in the order in which they come: `submit` hands one over, `collect` waits for the oldest result.

    Everything a step must do besides computing rides inside these two. `collect` raises `ExecutionError` when the step
    failed. Then, and after anything else that it or `submit` raised, call `abandon` before the next one. A step that
    `only_waits_for_transfers` ends when one has ended, or after a few milliseconds: it must neither spin nor keep the
    engine from those who arrive.
    """

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Start a step; another one may be submitted before its result is collected."""
        ...

    def collect(self) -> ModelOutput:
        """Wait for the oldest step that was submitted and not collected."""
        ...

    def abandon(self) -> None:
        """Give up all steps that were not collected: none of them is under way when this returns."""
        ...

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:
        """Begin what has to be ready before a request is scheduled, a grammar say; None where nothing has to be.

        Tenants take turns: the result is `running()` when it is theirs. It raises `RequestError` where the request
        cannot be served; so does this where nothing can be begun.
        """
        ...

    def shutdown(self) -> None:
        """Give everything back."""
        ...
