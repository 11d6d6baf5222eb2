"""The protocol by which the engine has steps computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.sampling_params import SamplingParams


class Executor(Protocol):
    """Computes steps in the order of their submission: `submit` starts one, `collect` waits for the oldest result.

    All other work of a step, such as copies and transfers, is part of these two calls. `collect` raises
    `ExecutionError` if the step failed. After any exception of `collect` or `submit`, call `abandon` before the next
    step. A step that `only_waits_for_transfers` ends when a transfer has ended, or after a few milliseconds: it must
    not spin, and must not delay new requests.
    """

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Start a step; another one may be submitted before its result is collected."""
        ...

    def collect(self) -> ModelOutput:
        """Wait for the oldest step that was submitted and not collected."""
        ...

    def abandon(self) -> None:
        """Abandon all steps that were not collected. None of them is running when this returns."""
        ...

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:
        """Start the preparation of a request, such as compiling its grammar; None if it needs no preparation.

        Tenants take turns: the future is `running()` once it is the tenant's turn. The future raises `RequestError` if
        the request cannot be served. The method itself raises it if the preparation cannot start.
        """
        ...

    def shutdown(self) -> None:
        """Free all resources."""
        ...
