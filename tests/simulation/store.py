"""A store of KV outside, both halves: it keeps what was in the blocks when they were read, and is not to be trusted.

Bytes move slot by slot over several steps, so a block that is given to others meanwhile is saved with their content.
Each record carries a checksum over its key and content, which is looked at when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.scheduler_output import TransferDirection

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer, SchedulerOutput
    from simulation.hash_model import HashWorker

_UNREAD = -2
RECORD_FAULTS = ("tampered", "truncated", "stale", "of another block", "lost")


@dataclass(slots=True)
class Record:
    """A block in the store."""

    contents: list[int]
    checksum: int

    @classmethod
    def of(cls, key: bytes, contents: list[int]) -> Record:
        """Make a record that is whole."""
        return cls(contents, checksum(key, contents))


def checksum(key: bytes, contents: list[int]) -> int:
    """Sum up a record and what it is of."""
    return hash((key, *contents))


@dataclass(slots=True)
class Moving:
    """A transfer under way. due: the step in which it ends; outcome: done, failed, lost. read: what was saved so far."""

    order: KVTransfer
    due: int
    outcome: str
    read: list[list[int]] = field(default_factory=list)


class SimulatedStore:
    """Both halves of a store, with delays, failures, faults of what is stored, and late, lost and double completions.

    rate: how often it offers what it has. checks: whether records are believed only with their checksum.
    """

    name = "simulated"
    max_steps = 4  # of a transfer

    def __init__(self, worker: HashWorker, rng: random.Random, rate: float) -> None:
        self.worker = worker
        self.rng = rng
        self.rate = rate
        self.faulty = True
        self.checks = True
        self.records: dict[bytes, Record] = {}
        self.moving: dict[int, Moving] = {}
        self.late: list[tuple[int, int, int]] = []
        self.faults: dict[str, int] = {}

    def publish(self, keys: Sequence[bytes], contents: list[int]) -> None:
        """Take in what another engine saved."""
        size = self.worker.block_size
        for index, key in enumerate(keys):
            self.records[key] = Record.of(key, contents[index * size : (index + 1) * size])

    # --- the scheduler's half -----------------------------------------------------------------------------------------

    def request_added(self, request: Request) -> None:
        """Nothing to note."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Offer what it has of some requests, and sometimes more than that; or think about it."""
        if self.rng.random() >= self.rate:
            return None if self.faulty and self.rng.random() < 0.2 else 0
        size = self.worker.block_size
        keys = request.block_hashes[num_computed_tokens // size :]
        count = next((i for i, key in enumerate(keys) if key not in self.records), len(keys))
        if self.faulty and self.rng.random() < 0.1:
            self._count("a store that says it has more")
            count += self.rng.randint(1, 3)
        return count * size

    def lookup_given_up(self, request: Request) -> None:
        """Nothing to note."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Nothing to note: the order comes with the step."""

    def keys_to_save(self, keys: Sequence[bytes]) -> set[bytes]:
        """Want what it has not, of most of them."""
        if not self.rate:
            return set()
        return {key for key in keys if key not in self.records and self.rng.random() < 0.8}

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Nothing to note: it comes with the step."""

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Offer no more what could not be loaded."""
        if transfer.direction is TransferDirection.LOAD and num_blocks is not None:
            for key in transfer.keys[num_blocks:]:
                self.records.pop(key, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Nothing is kept of requests."""

    # --- the worker's half --------------------------------------------------------------------------------------------

    def run(self, scheduled: SchedulerOutput) -> list[tuple[int, int]]:
        """Move bytes for one step; return the transfers that ended."""
        for transfer_id in scheduled.kv_cancels:
            self._cancel(transfer_id, scheduled.step)
        for order in scheduled.kv_transfers:
            self.moving[order.transfer_id] = self._begin(order, scheduled.step)
        ended = [(transfer_id, count) for due, transfer_id, count in self.late if due <= scheduled.step]
        self.late = [each for each in self.late if each[0] > scheduled.step]
        for transfer_id, moving in list(self.moving.items()):
            is_over = moving.due <= scheduled.step and moving.outcome != "lost"
            count = self._move(moving, is_over=is_over)
            if not is_over:
                continue
            del self.moving[transfer_id]
            ended.append((transfer_id, count))
            if self.faulty and self.rng.random() < 0.1:
                self._count("double completion")
                self.late.append((scheduled.step + self.rng.randint(0, 3), transfer_id, count))
        self.rng.shuffle(ended)
        if self.faulty and self.records and self.rng.random() < 0.05:
            self._spoil()
        return ended

    def _begin(self, order: KVTransfer, step: int) -> Moving:
        outcome = "done"
        if self.faulty and self.rng.random() < 0.2:
            outcome = self.rng.choice(["failed", "lost"])
            self._count(f"{outcome} {order.direction.value}")
        blank = [[_UNREAD] * self.worker.block_size for _ in order.keys]
        return Moving(order, step + self.rng.randint(0, self.max_steps), outcome, blank)

    def _cancel(self, transfer_id: int, step: int) -> None:
        moving = self.moving.pop(transfer_id, None)
        if moving is None:
            return
        self._move(moving, is_over=False)  # it was on its way: nothing is written after this step
        if self.faulty and self.rng.random() < 0.5:
            self._count("late completion")
            self.late.append((step + self.rng.randint(0, 3), transfer_id, len(moving.order.keys)))

    def _move(self, moving: Moving, *, is_over: bool) -> int:
        """Move some slots, or where it is over all that are left; return how many blocks it moved in all."""
        is_load = moving.order.direction is TransferDirection.LOAD
        is_whole = is_over and moving.outcome == "done"
        return (self._load if is_load else self._save)(moving, is_whole=is_whole)

    def _save(self, moving: Moving, *, is_whole: bool) -> int:
        for key, block_id, read in zip(moving.order.keys, moving.order.block_ids, moving.read, strict=True):
            for slot, content in enumerate(self.worker.blocks[block_id]):
                if read[slot] == _UNREAD and (is_whole or self.rng.random() < 0.3):
                    read[slot] = content
            if is_whole:
                self.records[key] = Record.of(key, read[:])
        return len(moving.order.keys) if is_whole else 0

    def _load(self, moving: Moving, *, is_whole: bool) -> int:
        """Write what arrived; a record that is gone or not whole ends the load where it is."""
        for index, (key, block_id) in enumerate(zip(moving.order.keys, moving.order.block_ids, strict=True)):
            record, block = self.records.get(key), self.worker.blocks[block_id]
            if record is not None:
                for slot, content in enumerate(record.contents):
                    if is_whole or self.rng.random() < 0.3:
                        block[slot] = content
            is_right = record is not None and checksum(key, record.contents) == record.checksum
            if is_whole and self.checks and not is_right:
                if record is not None:
                    self._count("a record that is refused")
                return index
        return len(moving.order.keys) if is_whole else 0

    def _spoil(self) -> None:
        """Do something to one of the records that are stored."""
        key = self.rng.choice(list(self.records))
        record, fault = self.records[key], self.rng.choice(RECORD_FAULTS)
        self._count(f"a record that is {fault}")
        other = self.rng.choice(list(self.records.values()))
        if fault == "lost":
            del self.records[key]
            return
        if fault == "tampered" and record.contents:
            contents = record.contents[:]
            contents[self.rng.randrange(len(contents))] ^= 1
            self.records[key] = Record(contents, record.checksum)
        elif fault == "truncated":
            self.records[key] = Record(record.contents[:-1], record.checksum)
        elif fault == "stale":  # the block was used again, and its name was not
            contents = [content ^ 1 for content in record.contents]
            self.records[key] = Record.of(bytes(32), contents)
        elif other is not record:
            self.records[key] = Record(other.contents[:], other.checksum)

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1
