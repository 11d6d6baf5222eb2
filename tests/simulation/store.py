"""An unreliable KV store, both halves: it keeps the content that blocks have when they are read.

Bytes move slot by slot over several steps, so a block that is reused meanwhile is saved with the new content. Each
record has a checksum over its key and content; checksum and length are checked on load. As in real stores, a block that
lost its part in the second KV group is saved without it, under its own key. A recurrent state is one record.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.kv_groups import RecurrentStates
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.scheduler_output import TransferDirection
from octavo.kv_transfer.group_parts import key_of_first_group, num_usable
from octavo.kv_transfer.stored_states import keys_of_state

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer, SchedulerOutput
    from simulation.hash_model import HashWorker

_UNREAD = -2
_LEASE_STEPS = 3  # a donor keeps blocks for so many steps without news of the load
_MAX_ASKED = 40  # a lookup waits for another engine's saves up to so many questions
RECORD_FAULTS = ("tampered", "truncated", "stale", "of another block", "lost")
_HALVED = "halved, with a checksum"  # for models with two groups: the remaining half is right


@dataclass(slots=True)
class Record:
    """A block in the store."""

    contents: list[int]
    checksum: int

    @classmethod
    def of(cls, key: bytes, contents: list[int]) -> Record:
        """Make a valid record."""
        return cls(contents, checksum(key, contents))


def checksum(key: bytes, contents: list[int]) -> int:
    """Return the checksum of a record and its key."""
    return hash((key, *contents))


def key_of_state(key: bytes) -> bytes:
    """Return the key of the state after a block."""
    return keys_of_state(key, 1)[0]


@dataclass(slots=True)
class Donor:
    """A prefill engine with one prompt. Its blocks arrive one after another, some of them or none.

    contents: of each block. states: the state after the prompt's blocks, by key, available with the last of them.

    is_direct: a load gets the blocks while they are computed; otherwise they go into the store. num_ever: the number of
    blocks after which the engine is gone. leased_until: the step in which it reuses their memory; None: no load has
    asked for them yet.
    """

    keys: list[bytes]
    contents: list[list[int]]
    is_direct: bool
    pace: float
    num_ever: int
    states: dict[bytes, list[int]] = field(default_factory=dict)
    num_there: int = 0
    num_asked: int = 0
    leased_until: int | None = None

    @property
    def is_over(self) -> bool:
        """Return True if no more blocks will arrive."""
        return self.num_there >= self.num_ever


@dataclass(slots=True)
class Moving:
    """An open transfer. due: the step in which it ends; outcome: done, failed, lost. read: the content saved so far.

    donor: the engine whose blocks it waits for; records: the blocks that have arrived.
    """

    order: KVTransfer
    due: int
    outcome: str
    read: list[list[int]] = field(default_factory=list)
    donor: Donor | None = None
    records: dict[bytes, Record] | None = None

    @property
    def waits(self) -> bool:
        """Return True if more blocks may arrive from a donor."""
        if self.donor is None or self.records is None:
            return False
        return not self.donor.is_over and self.order.keys[-1] not in self.records


class SimulatedStore:
    """Both halves of a store, with delays, failures, corrupt records, and late, lost and double completions.

    It also plays the prefill engines. breaches: calls in a wrong order, and blocks that a donor released while a load
    waited for them. rate: how often the store offers blocks. checks: records are used only if their checksum is right.
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
        self.donors: dict[str, Donor] = {}  # by request
        self.known: dict[str, int] = {}  # number of times that each request was added
        self.ordered: set[int] = set()
        self.num_handed_over = 0
        self.num_parts = Counter[str]()  # blocks with the first group only that were saved, and loaded
        self.num_states = Counter[str]()  # states that were saved, and loaded
        self.offered_states: set[bytes] = set()  # keys of their blocks
        self.has_states = any(isinstance(kind, RecurrentStates) for kind in worker.kinds)
        self.kinds = worker.kinds[:-1] if self.has_states else worker.kinds  # of groups with blocks of tokens
        self.num_groups = 1 + len(self.kinds)
        self.breaches: list[str] = []

    def hand_over(self, name: str, keys: list[bytes], contents: list[list[int]], states: list[int]) -> None:
        """Start the computation of a request's prompt by another engine. states: after each usable block."""
        num_ever = self.rng.choice([len(keys), len(keys), len(keys), self.rng.randint(0, len(keys))])
        if num_ever < len(keys):
            self._count("a prefill engine that is gone")
        pace = self.rng.choice([0.1, 0.5, 1.0])
        is_direct = self.rng.random() < 0.5 and not self.has_states
        self.donors[name] = Donor(keys, contents, is_direct, pace, num_ever)
        if states and num_ever == len(keys):
            self.donors[name].states[keys[len(states) - 1]] = states[-1:]

    def _record(self, donor: Donor, index: int) -> Record:
        """Return the record of a donor's block, which may be corrupt."""
        contents = donor.contents[index]
        record = Record.of(donor.keys[index], contents)
        if self.faulty and self.rng.random() < 0.05:
            self._count("a prefill engine that lies")
            record = Record([content ^ 1 for content in contents], record.checksum)
        return record

    def _advance(self) -> None:
        """Advance donors by a step; a block that goes through the store is available immediately."""
        for donor in self.donors.values():
            if donor.is_over or self.rng.random() >= donor.pace:
                continue
            if not donor.is_direct:
                key = donor.keys[donor.num_there]
                self.records.setdefault(key, self._record(donor, donor.num_there))
            donor.num_there += 1
            if donor.is_over:
                self._publish_states(donor.states)

    def _renew(self, step: int) -> None:
        """Renew the leases of donors that open transfers wait for."""
        for moving in self.moving.values():
            if moving.donor is not None:
                moving.donor.leased_until = step + _LEASE_STEPS

    def _publish_states(self, states: dict[bytes, list[int]]) -> None:
        for key, contents in states.items():
            name = key_of_state(key)
            self.records[name] = Record.of(name, contents)

    def publish(self, keys: Sequence[bytes], contents: list[list[int]], states: list[int]) -> None:
        """Add blocks that another engine saved, some of them with the first group only, and some of the states."""
        after = zip(keys, states, strict=False)
        self._publish_states({key: [state] for key, state in after if self.rng.random() < 0.5})
        for key, block in zip(keys, contents, strict=True):
            if self.kinds and self.rng.random() < 0.3:
                name = key_of_first_group(key)
                self.records[name] = Record.of(name, block[: self.worker.block_size])
            else:
                self.records[key] = Record.of(key, block)

    # --- the scheduler's half -----------------------------------------------------------------------------------------

    def request_added(self, request: Request) -> None:
        """Record the request."""
        self.known[request.request_id] = self.known.get(request.request_id, 0) + 1

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Offer the stored tokens of some requests, sometimes too many; or return None for a later answer."""
        if not self.known.get(request.request_id):
            self.breaches.append(f"asked for {request.request_id}, of which it was never told")
        donor = self.donors.get(request.request_id)
        if donor is not None:
            return self._expected(donor, request, num_computed_tokens)
        if self.rng.random() >= self.rate:
            return None if self.faulty and self.rng.random() < 0.2 else 0
        size = self.worker.block_size
        first = num_computed_tokens // size
        count = self._num_found(request.block_hashes[first:], first, request.num_tokens)
        if self.faulty and self.rng.random() < 0.1:
            self._count("a store that says it has more")
            count += self.rng.randint(1, 3)
        return count * size

    def _num_found(self, keys: list[bytes], first: int, num_tokens: int) -> int:
        """Return how many blocks of a sequence, from the `first` on, are stored and allow it to resume after them."""
        worker, is_whole = self.worker, list[bool]()
        for key in keys:
            if key not in self.records and not (self.kinds and key_of_first_group(key) in self.records):
                break
            is_whole.append(key in self.records)
        if self.has_states and self.faulty and self.rng.random() < 0.1:
            self._count("a store that looks for no state")
        elif self.has_states:
            size, states = worker.block_size, [key_of_state(key) in self.records for key in keys]
            most = max((num_tokens - 1) // size - first, 0)
            for count in range(min(most, len(is_whole)), 0, -1):
                if states[count - 1] and num_usable(is_whole[:count], first, num_tokens, size, self.kinds) == count:
                    return count
            return 0
        if False not in is_whole:
            return len(is_whole)
        if self.faulty and self.rng.random() < 0.2:
            self._count("a store that takes blocks of the first group for whole ones")
            return len(is_whole)
        return num_usable(is_whole, first, num_tokens, worker.block_size, self.kinds)

    def _expected(self, donor: Donor, request: Request, num_computed_tokens: int) -> int | None:
        """Offer the blocks that a donor computes; None while those that go through the store are awaited."""
        first = num_computed_tokens // self.worker.block_size
        keys = donor.keys[first:]
        if donor.is_direct:
            return len(keys) * self.worker.block_size
        donor.num_asked += 1
        if self.has_states:
            most = (request.num_prompt_tokens - 1) // self.worker.block_size - first
            count, keys = self._num_found(keys, first, request.num_prompt_tokens), keys[: max(most, 0)]
        else:
            count = next((i for i, key in enumerate(keys) if key not in self.records), len(keys))
        if count < len(keys) and donor.num_asked < _MAX_ASKED:
            return None
        return count * self.worker.block_size

    def lookup_given_up(self, request: Request) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing: the order comes with the step."""

    def keys_to_save(self, keys: Sequence[bytes], *, only_first_group: bool = False) -> set[bytes]:
        """Want most of the blocks that are not stored."""
        if not self.rate:
            return set()
        lacking = (key for key in keys if key not in self.records)
        if only_first_group:
            lacking = (key for key in lacking if key_of_first_group(key) not in self.records)
        return {key for key in lacking if self.rng.random() < 0.8}

    def states_to_save(self, keys: Sequence[bytes]) -> set[bytes]:
        """Want most of the states that are not stored."""
        self.offered_states.update(keys)
        lacking = (key for key in keys if self.rate and key_of_state(key) not in self.records)
        return {key for key in lacking if self.rng.random() < 0.8}

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Record the transfer: it comes with the step."""
        self.ordered.add(transfer.transfer_id)

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Forget the blocks that could not be loaded."""
        if transfer.transfer_id not in self.ordered:
            self.breaches.append(f"the end of transfer {transfer.transfer_id}, which was never ordered")
        self.ordered.discard(transfer.transfer_id)
        if transfer.direction is TransferDirection.LOAD and num_blocks is not None:
            for key in transfer.keys[num_blocks:]:
                self.records.pop(key, None)
                self.records.pop(key_of_first_group(key), None)
                self.records.pop(key_of_state(key), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Forget the request."""
        name = request.request_id
        self.known[name] = self.known.get(name, 0) - 1
        if self.known[name] < 0:
            self.breaches.append(f"the end of {name}, of which it was never told")
        if not self.known[name]:
            del self.known[name]
        self.donors.pop(name, None)

    # --- the worker's half --------------------------------------------------------------------------------------------

    def run(self, scheduled: SchedulerOutput) -> list[EndedTransfer]:
        """Move bytes for one step; return the transfers that ended."""
        self._advance()
        for transfer_id in scheduled.kv_cancels:
            self._cancel(transfer_id, scheduled.step)
        for order in scheduled.kv_transfers:
            self.moving[order.transfer_id] = self._begin(order, scheduled.step)
        self._renew(scheduled.step)
        ended = [EndedTransfer(transfer_id, count) for due, transfer_id, count in self.late if due <= scheduled.step]
        self.late = [each for each in self.late if each[0] > scheduled.step]
        for transfer_id, moving in list(self.moving.items()):
            self._receive(moving, scheduled.step)
            is_over = moving.due <= scheduled.step and moving.outcome != "lost" and not moving.waits
            count = self._move(moving, is_over=is_over)
            if not is_over:
                continue
            del self.moving[transfer_id]
            ended.append(EndedTransfer(transfer_id, count))
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
        blank = [[_UNREAD] * self.worker.block_size * self.num_groups for _ in order.keys]
        moving = Moving(order, step + self.rng.randint(0, self.max_steps), outcome, blank)
        donor = self.donors.get(order.request_id or "")
        if donor is not None and donor.is_direct and order.keys[-1] in donor.keys:
            moving.donor, moving.records = donor, {}
            donor.leased_until = step + _LEASE_STEPS
        return moving

    def _receive(self, moving: Moving, step: int) -> None:
        """Take the blocks that a donor has computed. An expired lease is recorded as a breach."""
        donor = moving.donor
        if donor is None or moving.records is None:
            return
        if donor.leased_until is not None and step > donor.leased_until:
            self.breaches.append(f"a donor let go what transfer {moving.order.transfer_id} waits for")
        for index, key in enumerate(donor.keys[: donor.num_there]):
            if key in moving.order.keys and key not in moving.records:
                moving.records[key] = self._record(donor, index)

    def _cancel(self, transfer_id: int, step: int) -> None:
        moving = self.moving.pop(transfer_id, None)
        if moving is None:
            return
        self._move(moving, is_over=False)  # slots on their way still arrive: nothing is written after this step
        if self.faulty and self.rng.random() < 0.5:
            self._count("late completion")
            self.late.append((step + self.rng.randint(0, 3), transfer_id, len(moving.order.keys)))

    def _move(self, moving: Moving, *, is_over: bool) -> int:
        """Move some slots, or if it is over all remaining ones; return the number of blocks moved in all."""
        is_load = moving.order.direction is TransferDirection.LOAD
        is_whole = is_over and moving.outcome == "done"
        return (self._load if is_load else self._save)(moving, is_whole=is_whole)

    def _save(self, moving: Moving, *, is_whole: bool) -> int:
        for index, (key, read) in enumerate(zip(moving.order.keys, moving.read, strict=True)):
            places = self._places(moving.order, index)
            for slot, content in enumerate(block[i] for block, i in places if block is not None):
                if read[slot] == _UNREAD and (is_whole or self.rng.random() < 0.3):
                    read[slot] = content
            if is_whole:
                name = key if places[-1][0] is not None else key_of_first_group(key)
                contents = read if name == key else read[: self.worker.block_size]
                self.records[name] = Record.of(name, contents[:])
                self.num_parts["saved"] += name != key
        for index, slot in moving.order.states.items() if is_whole else ():
            name = key_of_state(moving.order.keys[index])
            self.records[name] = Record.of(name, self.worker.memory[-1][slot][:1])
            self.num_states["saved"] += 1
        return len(moving.order.keys) if is_whole else 0

    def _load(self, moving: Moving, *, is_whole: bool) -> int:
        """Write arrived blocks; a missing or invalid record ends the load there."""
        for index, key in enumerate(moving.order.keys):
            records = self.records if moving.records is None else moving.records
            places = self._places(moving.order, index)
            needs_all = any(block is not None for block, _ in places[self.worker.block_size :])
            name = self._name(key, records, needs_all=needs_all)
            record, length = records.get(name), len(places) if name == key else self.worker.block_size
            if record is not None:
                for (block, slot), content in zip(places, record.contents, strict=False):  # it may be truncated
                    if block is not None and (is_whole or self.rng.random() < 0.3):
                        block[slot] = content
            is_right = record is not None and checksum(name, record.contents) == record.checksum
            is_right = is_right and record is not None and len(record.contents) == length
            if is_whole and self.checks and not is_right:
                if record is not None:
                    self._count("a record that is refused")
                return index
            self.num_parts["loaded"] += is_whole and name != key
        if not self._load_state(moving, is_whole=is_whole):
            return len(moving.order.keys) - 1
        if is_whole and moving.donor is not None:
            self.num_handed_over += 1
        return len(moving.order.keys) if is_whole else 0

    def _load_state(self, moving: Moving, *, is_whole: bool) -> bool:
        """Write the state after the last block; return False if its record is missing or invalid."""
        for index, slot in moving.order.states.items():
            name = key_of_state(moving.order.keys[index])
            record = self.records.get(name)
            if record is not None and record.contents and (is_whole or self.rng.random() < 0.3):
                self.worker.memory[-1][slot][0] = record.contents[0]
            is_right = record is not None and checksum(name, record.contents) == record.checksum
            is_right = is_right and record is not None and len(record.contents) == 1
            if is_whole and self.checks and not is_right:
                if record is not None:
                    self._count("a state that is refused")
                return False
            self.num_states["loaded"] += is_whole
        return True

    def _name(self, key: bytes, records: dict[bytes, Record], *, needs_all: bool) -> bytes:
        """Return the key of a block's record: the one for the first group only, if no row reads the other groups."""
        if needs_all or key in records:
            return key
        return key_of_first_group(key)

    def _places(self, order: KVTransfer, index: int) -> list[tuple[list[int] | None, int]]:
        """Return where the contents of a transfer's block are: slots of its block in each KV group, or None."""
        slots = range(self.worker.block_size)
        ids = [block_ids[index] for block_ids in order.block_ids]
        memories = self.worker.memory[: self.num_groups]
        blocks = [None if each < 0 else memory[each] for memory, each in zip(memories, ids, strict=True)]
        return [(block, slot) for block in blocks for slot in slots]

    def _spoil(self) -> None:
        """Corrupt one of the stored records."""
        key = self.rng.choice(list(self.records))
        faults = (*RECORD_FAULTS, _HALVED) if self.kinds else RECORD_FAULTS
        record, fault = self.records[key], self.rng.choice(faults)
        self._count(f"a record that is {fault}")
        other = self.rng.choice(list(self.records.values()))
        if fault == "lost":
            del self.records[key]
            return
        if fault == "tampered" and record.contents:
            contents = record.contents[:]
            contents[self.rng.randrange(len(contents))] ^= 1
            self.records[key] = Record(contents, record.checksum)
        elif fault == _HALVED:
            self.records[key] = Record.of(key, record.contents[: len(record.contents) // 2])
        elif fault == "truncated":
            self.records[key] = Record(record.contents[:-1], record.checksum)
        elif fault == "stale":  # the block was reused, but not its key
            contents = [content ^ 1 for content in record.contents]
            self.records[key] = Record.of(bytes(32), contents)
        elif other is not record:
            self.records[key] = Record(other.contents[:], other.checksum)

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1
