"""The scheduler's interface and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.data import events
from octavo.data.snapshot import BlockMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.scheduler import Scheduler
    from octavo.data.model_output import ModelOutput
    from octavo.data.request import Request, RequestStatus
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.outputs import EngineCoreOutput


class SchedulerInterface(Protocol):
    """The methods of a scheduler that the engine core uses."""

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

    def get_stats(self) -> SchedulerStats:
        """See `Scheduler`."""
        ...

    def block_map(self) -> BlockMap:
        """See `Scheduler`."""
        ...

    def reset_prefix_cache(self) -> bool:
        """See `Scheduler`."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Totals since the start, and the present state.

    total_scheduled: requests, summed over all steps. num_waiting: with loading requests. kv_cache_usage,
    cache_hit_rate: 0 to 1. prefill_limit: see `Batching`.
    """

    total_scheduled: int
    total_preempted: int
    total_swapped: int
    total_finished: int
    total_tokens_scheduled: int
    total_tokens_generated: int
    num_waiting: int
    num_running: int
    kv_cache_usage: float
    cache_hit_rate: float
    num_cached_blocks: int
    num_steps: int
    prefill_limit: int

    @classmethod
    def of(cls, scheduler: Scheduler, prefill_limit: int) -> SchedulerStats:
        """Return the statistics of a scheduler."""
        counters, manager = scheduler.counters, scheduler.kv_cache_manager
        num_running, num_waiting = scheduler.get_request_counts()
        return cls(
            total_scheduled=counters.num_scheduled,
            total_preempted=counters.count[events.RequestPreempted],
            total_swapped=counters.num_swapped,
            total_finished=counters.count[events.RequestFinished],
            total_tokens_scheduled=counters.num_tokens_scheduled,
            total_tokens_generated=counters.num_tokens_generated,
            num_waiting=num_waiting,
            num_running=num_running,
            kv_cache_usage=manager.pool.usage,
            cache_hit_rate=counters.cache_hit_rate,
            num_cached_blocks=manager.pool.num_cached_blocks,
            num_steps=counters.count[events.StepScheduled],
            prefill_limit=prefill_limit,
        )


def map_blocks(scheduler: Scheduler) -> BlockMap:
    """Return which request holds which blocks of the first KV group."""
    tables = ((request_id, request.sequence.block_table) for request_id, request in scheduler.requests.items())
    holders = {request_id: list(table) for request_id, table in tables if table}
    manager = scheduler.kv_cache_manager
    return BlockMap(manager.block_size, manager.pool.states(), holders)
