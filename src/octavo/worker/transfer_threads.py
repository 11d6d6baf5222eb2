"""Threads that move bytes between a store and the KV cache while steps run.

A load writes blocks after the store has returned their bytes. A save reads blocks before it calls the store. Writes and
reads hold the transfer's lock, and check for a cancel first, so a cancelled transfer touches no block after `cancel`
returns.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from octavo.data.kv_tiers import EndedTransfer
from octavo.data.scheduler_output import TransferDirection, are_whole
from octavo.kv_transfer import group_parts
from octavo.kv_transfer.guard import HANGS_AFTER_S
from octavo.kv_transfer.stored_states import keys_of_state
from octavo.kv_transfer.tiers import TierTally
from octavo.runtime.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.scheduler_output import KVTransfer, SchedulerOutput
    from octavo.kv_transfer.tiers import TieredStore
    from octavo.worker.host_copies import Mark
    from octavo.worker.stored_blocks import PieceBuffer, TransferredBlocks

logger = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20  # a cancel waits for one piece; a larger save becomes several files
_SHUTDOWN_S = 2.0


class KVMover(Protocol):
    """Moves KV between store and cache."""

    def cancel(self, scheduled: SchedulerOutput) -> None:
        """Cancel transfers for a step. Call this before anything in the step changes a block."""
        ...

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Start a step's transfers. Call this after the step's block copies and before its computation."""
        ...

    def shutdown(self) -> None:
        """Stop within seconds."""
        ...


class NoKVMover:
    """Moves nothing."""

    def cancel(self, scheduled: SchedulerOutput) -> None:
        """Do nothing."""

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Moving:
    """An unreported transfer. begun: a mark after all earlier steps."""

    order: KVTransfer
    begun: Mark
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False
    num_moved: int = 0
    tally: TierTally = field(default_factory=TierTally)


class KVTransferThreads:
    """Runs the transfers of steps, and closes the store at shutdown.

    report: called from any thread, once per transfer that was not cancelled. num_threads: number of threads for loads.
    One more thread saves.
    """

    def __init__(
        self,
        blocks: TransferredBlocks,
        store: TieredStore,
        report: Callable[[EndedTransfer], None],
        *,
        num_threads: int,
    ) -> None:
        self._blocks = blocks
        assert store.block_bytes == self._blocks.block_bytes, "the KV store has another block size"
        self._store = store
        self._report = report
        self._moving: dict[int, _Moving] = {}
        self._lock = threading.Lock()
        self._piece_blocks = piece_blocks(self._blocks.block_bytes)
        self._threads = {
            TransferDirection.LOAD: DaemonThreads(num_threads, "octavo-kv-load", HANGS_AFTER_S),
            TransferDirection.SAVE: DaemonThreads(1, "octavo-kv-save", HANGS_AFTER_S),
        }
        self._buffers: dict[TransferDirection, queue.SimpleQueue[PieceBuffer]] = {
            TransferDirection.LOAD: queue.SimpleQueue(),
            TransferDirection.SAVE: queue.SimpleQueue(),
        }
        for direction, count in ((TransferDirection.LOAD, num_threads), (TransferDirection.SAVE, 1)):
            for _ in range(count):
                self._buffers[direction].put(self._blocks.make_buffer(self._piece_blocks))

    @property
    def num_moving(self) -> int:
        """Number of running transfers."""
        return len(self._moving)

    def cancel(self, scheduled: SchedulerOutput) -> None:
        """See `KVMover`."""
        for transfer_id in scheduled.kv_cancels:
            with self._lock:
                moving = self._moving.pop(transfer_id, None)
            if moving is not None:
                with moving.lock:
                    moving.is_cancelled = True

    def begin(self, scheduled: SchedulerOutput) -> None:
        """See `KVMover`."""
        begun = self._blocks.mark()
        for order in scheduled.kv_transfers:
            moving = _Moving(order, begun)
            with self._lock:
                self._moving[order.transfer_id] = moving
            self._threads[order.direction].submit(partial(self._run, moving))

    def _run(self, moving: _Moving) -> None:
        order = moving.order
        buffers, buffer = self._buffers[order.direction], None
        move = self._load if order.direction is TransferDirection.LOAD else self._save
        try:
            buffer = self._take(buffers)
            firsts = range(0, len(order.keys), self._piece_blocks)
            if all(not moving.is_cancelled and move(moving, first, buffer) for first in firsts):
                self._move_states(moving, buffer)
        except BaseException:
            logger.exception("a KV %s failed", order.direction.value)
        finally:
            if buffer is not None:
                buffers.put(buffer)
            with self._lock:
                is_known = self._moving.pop(order.transfer_id, None) is not None
            if is_known:
                moves, evicted = moving.tally.moves(), self._store.take_evicted()
                self._report(EndedTransfer(order.transfer_id, moving.num_moved, moves, evicted))

    def _take(self, buffers: queue.SimpleQueue[PieceBuffer]) -> PieceBuffer:
        try:
            return buffers.get_nowait()
        except queue.Empty:  # hanging threads hold all buffers
            return self._blocks.make_buffer(self._piece_blocks)

    def _load(self, moving: _Moving, first: int, buffer: PieceBuffer) -> bool:
        keys, block_ids = self._piece(moving, first)
        views, needs_all = buffer.views(len(keys)), self._blocks.need_all(block_ids)
        count = group_parts.load(self._store, keys, views, needs_all, self._blocks.part_bytes, moving.tally)
        self._blocks.wait(moving.begun)
        with moving.lock:
            if moving.is_cancelled:
                return False
            buffer.write([ids[:count] for ids in block_ids], moving.begun)
        moving.num_moved += count
        return count == len(keys)

    def _save(self, moving: _Moving, first: int, buffer: PieceBuffer) -> bool:
        keys, block_ids = self._piece(moving, first)
        self._blocks.wait(moving.begun)
        with moving.lock:
            if moving.is_cancelled:
                return False
            buffer.read(block_ids, moving.begun)
        views, has_all = buffer.views(len(keys)), are_whole(block_ids)
        count = group_parts.save(self._store, keys, views, has_all, self._blocks.part_bytes, moving.tally)
        moving.num_moved += count
        return count == len(keys)

    def _move_states(self, moving: _Moving, buffer: PieceBuffer) -> None:
        order, num_pieces = moving.order, self._blocks.num_state_pieces
        is_load = order.direction is TransferDirection.LOAD
        move = self._load_state if is_load else self._save_state
        for index, slot in order.states.items():
            moving.num_moved -= is_load  # without its state, a request cannot resume after the last block
            keys = keys_of_state(order.keys[index], num_pieces)
            pieces = range(0, num_pieces, self._piece_blocks)
            is_moved = all(move(moving, slot, keys, first, buffer) for first in pieces)
            moving.num_moved += is_load and is_moved

    def _load_state(self, moving: _Moving, slot: int, keys: list[bytes], first: int, buffer: PieceBuffer) -> bool:
        some = keys[first : first + self._piece_blocks]
        if self._store.load(some, buffer.views(len(some)), moving.tally) < len(some):
            return False
        with moving.lock:
            if not moving.is_cancelled:
                buffer.write_state(slot, first, len(some), moving.begun)
        return not moving.is_cancelled

    def _save_state(self, moving: _Moving, slot: int, keys: list[bytes], first: int, buffer: PieceBuffer) -> bool:
        some = keys[first : first + self._piece_blocks]
        with moving.lock:
            if moving.is_cancelled:
                return False
            buffer.read_state(slot, first, len(some), moving.begun)
        return self._store.save(some, buffer.views(len(some)), moving.tally) == len(some)

    def _piece(self, moving: _Moving, first: int) -> tuple[list[bytes], list[list[int]]]:
        order, end = moving.order, first + self._piece_blocks
        return order.keys[first:end], [ids[first:end] for ids in order.block_ids]

    def shutdown(self) -> None:
        """Cancel all transfers. Close the store, or abandon a hanging one."""
        with self._lock:
            all_moving = list(self._moving.values())
            self._moving.clear()
        for moving in all_moving:
            with moving.lock:
                moving.is_cancelled = True
        for threads in self._threads.values():
            threads.close(_SHUTDOWN_S / 2)
        closing = threading.Thread(target=self._store.close, name="octavo-kv-close", daemon=True)
        closing.start()
        closing.join(_SHUTDOWN_S)
        if closing.is_alive():
            logger.warning("KV store %s did not close within %g s; it is abandoned", self._store.name, _SHUTDOWN_S)


def piece_blocks(block_bytes: int) -> int:
    """Return the blocks per piece."""
    return max(_PIECE_BYTES // block_bytes, 1)


def staging_bytes(block_bytes: int, num_threads: int) -> int:
    """Return the bytes of all buffers in host memory, if no store hangs. A GPU has buffers of the same size."""
    return (num_threads + 1) * piece_blocks(block_bytes) * block_bytes
