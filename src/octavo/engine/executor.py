"""The interface of executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.sampling_params import SamplingParams


class Executor(Protocol):
    """Computes steps in the order of submission.

    `collect` raises `ExecutionError` if the step failed. After any exception of `collect` or `submit`, call `abandon`
    before the next step. A step with `only_waits_for_transfers` ends when a KV transfer ends, or after a few
    milliseconds.
    """

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Start a step. The next one may be submitted before `collect` is called."""
        ...

    def collect(self) -> ModelOutput:
        """Wait for the result of the oldest step."""
        ...

    def abandon(self) -> None:
        """Cancel all uncollected steps, and wait until none of them runs."""
        ...

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:
        """Prepare a request, for example compile its grammar. Return None if no preparation is needed.

        Tenants take turns. The future is `running()` once the tenant's turn comes, and raises `RequestError` if the
        request cannot be served. Raises `RequestError` if the preparation cannot start.
        """
        ...

    def check(self) -> None:
        """Raise `EngineDeadError` if no later step can succeed."""
        ...

    def shutdown(self) -> None:
        """Free all resources."""
        ...
