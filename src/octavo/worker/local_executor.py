"""Runs a worker in this process."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from typing import TYPE_CHECKING

from octavo.errors import ExecutionError
from octavo.worker.step_modes import ComputesAtOnce
from octavo.worker.transfer_threads import NoKVMover

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from octavo.data.kv_tiers import EndedTransfer
    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.kv_transfer.tiers import TieredStore
    from octavo.sampling_params import SamplingParams
    from octavo.worker.step_modes import StepMode
    from octavo.worker.transfer_threads import KVMover
    from octavo.worker.worker import Worker

TRANSFER_WAIT_S = 0.01  # new requests wait meanwhile


class LocalExecutor:
    """Runs a worker in this process, and transfers KV between worker and store.

    store: closed at shutdown. num_threads: number of threads for loads. ended_transfers: None only wakes the reader.
    """

    def __init__(
        self,
        worker: Worker,
        store: TieredStore | None = None,
        *,
        num_threads: int = 1,
        mode: Callable[[Worker], StepMode] = ComputesAtOnce,
    ) -> None:
        self._mode = mode(worker)
        self._submitted: deque[SchedulerOutput] = deque()
        self.ended_transfers: queue.SimpleQueue[EndedTransfer | None] = queue.SimpleQueue()
        self._kv_mover: KVMover = NoKVMover()
        if store is not None:
            self._kv_mover = worker.start_kv_transfers(store, self.ended_transfers.put, num_threads=num_threads)

    @property
    def worker(self) -> Worker:
        """The worker, until `shutdown`."""
        return self._mode.worker

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:
        """Compile a request's grammar in the background."""
        wanted, grammars = params.structured_outputs, self.worker.grammars
        if wanted is None or grammars is None:  # grammars need a tokenizer
            return None
        return grammars.prepare(wanted, tenant)

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Begin a step. Errors are raised by `collect`."""
        self._mode.submit(scheduled)
        self._submitted.append(scheduled)

    def collect(self) -> ModelOutput:
        """Return the oldest step's result, or raise its `ExecutionError`."""
        assert self._submitted, "collect without submit"
        result = self._mode.collect()
        only_waits = self._submitted.popleft().only_waits_for_transfers
        if isinstance(result, ExecutionError):
            raise result
        if only_waits or not self.ended_transfers.empty():
            result.kv_transfers.extend(self._take_ended_transfers(only_waits=only_waits))
        return result

    def abandon(self) -> None:
        """Discard uncollected steps. Waits for the running step."""
        self._submitted.clear()
        self._mode.abandon()

    def check(self) -> None:
        """See `Executor`."""
        self.worker.check()

    def wake(self) -> None:
        """End a step that only waits for KV. Thread-safe."""
        self.ended_transfers.put(None)

    def _take_ended_transfers(self, *, only_waits: bool) -> list[EndedTransfer]:
        ended: list[EndedTransfer | None] = []
        with contextlib.suppress(queue.Empty):
            if only_waits:
                ended.append(self.ended_transfers.get(timeout=TRANSFER_WAIT_S))
            while True:
                ended.append(self.ended_transfers.get_nowait())
        return [each for each in ended if each is not None]

    def shutdown(self) -> None:
        """Close the store. Drop weights and KV. End other ranks."""
        self._mode.shutdown()
        kv_mover, self._kv_mover = self._kv_mover, NoKVMover()
        kv_mover.shutdown()
