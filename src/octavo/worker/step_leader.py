"""The interface through which rank 0 leads the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.data.worker_info import WorkerInfo
    from octavo.errors import EngineDeadError
    from octavo.kernels.ranked import RankGroup
    from octavo.models.architecture import Architecture
    from octavo.worker.kv_cache import PagedKVCache
    from octavo.worker.stored_blocks import TransferredBlocks


class StepLeader(Protocol):
    """Leads the other ranks; see `octavo.ranks.leader`. num_threads: number of threads of each rank."""

    group: RankGroup
    num_threads: int

    def await_loaded(self, kernels: str) -> None:
        """Wait until all ranks have loaded their weights."""
        ...

    def allocate(self, info: WorkerInfo, num_scratch_blocks: int, num_kept_rows: int) -> None:
        """Have all ranks allocate KV. num_scratch_blocks: of each sequence. num_kept_rows: see `PagedKVCache`."""
        ...

    def blocks_of_ranks(self, architecture: Architecture, kv_cache: PagedKVCache) -> TransferredBlocks:
        """Return the blocks of all ranks. architecture, kv_cache: rank 0's."""
        ...

    @property
    def checksums(self) -> list[tuple[str, str]]:
        """Checksums of the other ranks' weights and of their drafts' weights, after `allocate`."""
        ...

    def announce(self, scheduled: SchedulerOutput) -> None:
        """Send a step that rank 0 is about to compute."""
        ...

    def announce_drafts(self, request_ids: list[str], token_ids: list[int], positions: list[int]) -> None:
        """Send a pass of the draft model over one token per request."""
        ...

    def take_sampled(self, tokens: dict[str, list[int]]) -> None:
        """Send tokens with the next step."""
        ...

    def failed(self, error: BaseException) -> EngineDeadError:
        """End all ranks after an error in rank 0's step. Return the error to raise."""
        ...

    def failure(self) -> EngineDeadError | None:
        """Return an error if a rank has failed."""
        ...

    def shutdown(self) -> None:
        """End the other ranks."""
        ...
