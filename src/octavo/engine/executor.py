"""The protocol of an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.sampling_params import SamplingParams


class Executor(Protocol):
    """Computes steps in order.

    `collect` raises `ExecutionError` if the step failed. After any exception of `collect` or `submit`, call `abandon`
    before the next step. If the step's `only_waits_for_transfers` is true, it ends as soon as
    a transfer has ended, or after a few milliseconds. So the core does not spin, and new requests do not wait.
    """

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Start a step. Another one may follow before its result is collected."""
        ...

    def collect(self) -> ModelOutput:
        """Wait for the result of the oldest step."""
        ...

    def abandon(self) -> None:
        """Abandon all uncollected steps. None of them runs when this returns."""
        ...

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:
        """Start a preparation if needed, such as of a grammar.

        Tenants take turns: the future is `running()` from its turn on. It raises `RequestError` if the request cannot
        be served. This method raises it if the preparation cannot start.
        """
        ...

    def shutdown(self) -> None:
        """Free all resources."""
        ...
