"""A worker whose tokens show any wrong, stale, swapped, unwritten or too early shared KV slot.

The content of slot i hashes the content of slot i - 1, read through the block table, with token i, i and the identity
of the weights. The next token is a position-mixed sum over slots 0 .. i, all read through the block table when it is
sampled. Freed blocks are poisoned. The oracle computes the same from the list of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.model_output import ModelOutput

if TYPE_CHECKING:
    import random

    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVLoad, SchedulerOutput

VOCAB_SIZE = 1 << 16
_MASK = (1 << 61) - 1
_WEIGHTS = [(2 * i + 1) * 0x9E3779B97F4A7C15 & _MASK for i in range(4096)]
POISON = -1


def slot_content(previous: int, token: int, position: int, identity: int) -> int:
    """Content of one slot; Python's hash of integers is the same in every process."""
    return hash((previous, token, position, identity)) & _MASK


class Oracle:
    """The tokens a request has to get, whatever the schedule."""

    def __init__(self, prompt: list[int], identity: int) -> None:
        self.identity = identity
        self._content = 0
        self._sum = 0
        self.length = 0
        self.contents: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self._content = slot_content(self._content, token, self.length, self.identity)
        self._sum += self._content * _WEIGHTS[self.length]
        self.length += 1
        self.contents.append(self._content)

    def next_token(self) -> int:
        """Return the token that follows."""
        return self._sum % VOCAB_SIZE

    def accept(self, token: int) -> None:
        """Go on behind it."""
        self._append(token)

    def guess(self, count: int, error_rate: float, rng: random.Random) -> list[int]:
        """Return the next tokens as a draft model would: each wrong with probability `error_rate`."""
        content, total, length = self._content, self._sum, self.length
        tokens = []
        for _ in range(count):
            token = total % VOCAB_SIZE
            if rng.random() < error_rate:
                token ^= 1
            tokens.append(token)
            content = slot_content(content, token, length, self.identity)
            total += content * _WEIGHTS[length]
            length += 1
        return tokens


@dataclass(slots=True)
class Row:
    """What the worker knows of a request."""

    tokens: list[int]
    table: list[int]
    computed: int
    identity: int


@dataclass(slots=True)
class Transfer:
    """A load under way; `outcome`: done, failed, lost. due: the step in which it ends."""

    order: KVLoad
    due: int
    outcome: str
    contents: list[int] = field(default_factory=list)


class HashWorker:
    """Keeps blocks, tables and tokens exactly as told by the scheduler's outputs."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.blocks = [[POISON] * block_size for _ in range(num_blocks)]
        self.host = [[POISON] * block_size for _ in range(num_host_blocks)]
        self.rows: dict[str, Row] = {}
        self.identities: dict[str, int] = {}

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Do one step."""
        self._copy(scheduled)
        self._update(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        sampled: dict[str, list[int]] = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            tokens = self._compute(self.rows[request_id], count, drafts.get(request_id, []))
            if tokens:
                sampled[request_id] = tokens
        return ModelOutput(scheduled.step, sampled)

    def _copy(self, scheduled: SchedulerOutput) -> None:
        copies = scheduled.copies
        for block, host in copies.swap_out:
            self.host[host] = self.blocks[block][:]
        for source, target in copies.block_copies:
            self.blocks[target] = self.blocks[source][:]
        for host, block in copies.swap_in:
            self.blocks[block] = self.host[host][:]

    def _update(self, scheduled: SchedulerOutput) -> None:
        for request_id in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            self.rows.pop(request_id, None)
        for data in scheduled.scheduled_new_reqs:
            identity = self.identities[data.request_id]
            self.rows[data.request_id] = Row(
                list(data.token_ids), list(data.block_ids), data.num_computed_tokens, identity
            )
        cached = scheduled.scheduled_cached_reqs
        for request_id, tokens, block_ids, computed in zip(
            cached.req_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.rows[request_id]
            row.tokens += tokens
            row.table += block_ids
            row.computed = computed

    def _compute(self, row: Row, count: int, drafts: list[int]) -> list[int]:
        """Write `count` slots; return the model's own choices, as far as they confirm the drafts, and one more."""
        size, blocks, table, identity = self.block_size, self.blocks, row.table, row.identity
        start, tokens = row.computed, row.tokens + drafts
        content = blocks[table[(start - 1) // size]][(start - 1) % size] if start else 0
        for position in range(start, start + count):
            content = slot_content(content, tokens[position], position, identity)
            blocks[table[position // size]][position % size] = content
        num_known = len(row.tokens)
        if start + count < num_known:
            return []
        contents: list[int] = []
        for block_id in table[: -(-(start + count) // size)]:
            contents += blocks[block_id]
        total = sum(map(int.__mul__, contents[:num_known], _WEIGHTS))
        sampled = [total % VOCAB_SIZE]
        for index, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            total += contents[num_known + index] * _WEIGHTS[num_known + index]
            sampled.append(total % VOCAB_SIZE)
        return sampled

    def poison(self, block_ids: list[int]) -> None:
        """Overwrite blocks that nobody holds."""
        size = self.block_size
        for block_id in block_ids:
            self.blocks[block_id] = [POISON] * size


class SimulatedStore:
    """Both halves of a store of KV outside, with delays, failures, and late, lost and double completions.

    As a `KVConnector` it offers a seeded number of tokens; as a worker it writes contents that the oracle knows.
    """

    def __init__(self, worker: HashWorker, rng: random.Random, rate: float) -> None:
        self.worker = worker
        self.rng = rng
        self.rate = rate
        self.faulty = True
        self.transfers: dict[int, Transfer] = {}
        self.late: list[tuple[int, int, bool]] = []
        self.faults: dict[str, int] = {}
        self.contents_of: dict[str, Oracle] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Offer some tokens of some requests."""
        if self.rng.random() >= self.rate:
            return 0
        return self.rng.randint(0, max(request.num_tokens - num_computed_tokens, 0))

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Nothing to note: the order comes with the step."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Nothing is stored: contents are computed."""

    def run(self, scheduled: SchedulerOutput) -> list[tuple[int, bool]]:
        """Move bytes for one step; return the transfers that ended."""
        for transfer_id in scheduled.kv_cancels:
            transfer = self.transfers.pop(transfer_id, None)
            if transfer is None:
                continue
            self._write(transfer, whole=False)  # it was on its way: nothing is written after this step
            if self.faulty and self.rng.random() < 0.5:
                self._count("late completion")
                self.late.append((scheduled.step + self.rng.randint(0, 3), transfer_id, True))
        for order in scheduled.kv_loads:
            self.transfers[order.transfer_id] = self._transfer(order, scheduled.step)
        ended = [(transfer_id, ok) for due, transfer_id, ok in self.late if due <= scheduled.step]
        self.late = [each for each in self.late if each[0] > scheduled.step]
        for transfer_id, transfer in list(self.transfers.items()):
            self._write(transfer, whole=transfer.outcome == "done" and transfer.due <= scheduled.step)
            if transfer.due > scheduled.step or transfer.outcome == "lost":
                continue
            del self.transfers[transfer_id]
            ended.append((transfer_id, transfer.outcome == "done"))
            if self.faulty and self.rng.random() < 0.1:
                self._count("double completion")
                self.late.append((scheduled.step + self.rng.randint(0, 3), transfer_id, True))
        self.rng.shuffle(ended)
        return ended

    def _transfer(self, order: KVLoad, step: int) -> Transfer:
        outcome = "done"
        if self.faulty and self.rng.random() < 0.3:
            outcome = self.rng.choice(["failed", "lost"])
            self._count(f"{outcome} load")
        row = Oracle(order.token_ids, self.worker.identities[order.request_id])
        return Transfer(order, step + self.rng.randint(0, 4), outcome, row.contents)

    def _write(self, transfer: Transfer, *, whole: bool) -> None:
        """Write what arrived: some slots of a transfer under way, all of one that is done."""
        order, size = transfer.order, self.worker.block_size
        for position in range(order.num_present, len(order.token_ids)):
            if whole or self.rng.random() < 0.3:
                block_id = order.block_ids[position // size]
                self.worker.blocks[block_id][position % size] = transfer.contents[position]

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1
