"""The scheduler's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.data.snapshot import BlockMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.scheduler import Scheduler
    from octavo.data.model_output import ModelOutput
    from octavo.data.request import Request, RequestStatus
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.outputs import EngineCoreOutput


class SchedulerInterface(Protocol):
    """The methods of `Scheduler` that the engine core calls."""

    def schedule(self) -> SchedulerOutput:
        """See `Scheduler`."""
        ...

    @property
    def in_flight(self) -> SchedulerOutput | None:
        """See `Scheduler`."""
        ...

    def may_look_ahead(self) -> bool:
        """See `Scheduler`."""
        ...

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelOutput) -> list[EngineCoreOutput]:
        """See `Scheduler`."""
        ...

    def fail_step(self, scheduled: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """See `Scheduler`."""
        ...

    def add_request(self, request: Request) -> None:
        """See `Scheduler`."""
        ...

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """See `Scheduler`."""
        ...

    def has_work(self) -> bool:
        """See `Scheduler`."""
        ...

    def get_num_transfers(self) -> int:
        """See `Scheduler`."""
        ...

    def get_num_unfinished_requests(self) -> int:
        """See `Scheduler`."""
        ...

    def check_when_idle(self) -> Iterable[object]:
        """See `Scheduler`."""
        ...

    def block_map(self) -> BlockMap:
        """See `Scheduler`."""
        ...

    def reset_prefix_cache(self) -> bool:
        """See `Scheduler`."""
        ...


def map_blocks(scheduler: Scheduler) -> BlockMap:
    """Return block states and block tables of the first KV group."""
    tables = ((request_id, request.sequence.block_table) for request_id, request in scheduler.requests.items())
    holders = {request_id: list(table) for request_id, table in tables if table}
    manager = scheduler.kv_cache_manager
    return BlockMap(manager.block_size, manager.pool.states(), holders)
