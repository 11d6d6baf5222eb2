"""A worker whose tokens reveal any wrong, stale, swapped, unwritten or prematurely shared KV slot.

The content of slot i is a hash of the content of slot i - 1, read through the block table, with token i, i and the
identity of the weights; within a span, also with the span's content. The next token is a position-mixed sum over slots
0 .. i, all read through the block table when it is sampled. Freed blocks are poisoned. The oracle computes the same
from the list of tokens alone.

With further KV groups, each slot has a content in a block of each group. The content in the first group then also
hashes the contents that the row reads in the further groups, by the kind of the group and through its block table at
the time of the computation.

A group of recurrent states has one content per sequence, in its slot, and nothing per position. As in the worker, the
stored state excludes rows that may be computed again: their inputs are kept, and applied before the next rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.kv_groups import RecurrentStates
from octavo.data.model_output import ModelOutput

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import ContentSpan
    from octavo.data.scheduler_output import SchedulerOutput

VOCAB_SIZE = 1 << 16
_MASK = (1 << 61) - 1
_WEIGHTS = [(2 * i + 1) * 0x9E3779B97F4A7C15 & _MASK for i in range(4096)]
POISON = -1


def slot_content(previous: int, token: int, position: int, identity: int) -> int:
    """Return the content of one slot; Python's hash of integers is the same in every process."""
    return hash((previous, token, position, identity)) & _MASK


def identity_at(identity: int, spans: Sequence[ContentSpan], position: int) -> int:
    """Return what a slot's content depends on in addition to tokens and slots: the weights, and the span around it."""
    for span in spans:
        if span.first <= position < span.end:
            return hash((identity, int(span.key), position - span.first))
    return identity


def next_state(state: int, content: int, token: int, position: int, identity: int) -> int:
    """Return the state after a row, whose input is a token and the content of earlier groups."""
    return slot_content(state * 3 ^ content, token, position, ~identity)


def read_content(contents: list[int], position: int) -> int:
    """Mix the contents that the row at a position reads in a further group, its own content last."""
    return hash((position, *contents)) & _MASK


class Oracle:
    """The tokens that a request must get in every schedule. kinds: of the KV groups after the first."""

    def __init__(
        self,
        prompt: list[int],
        identity: int,
        kinds: Sequence[KVGroupKind] = (),
        spans: Sequence[ContentSpan] = (),
    ) -> None:
        self.identity = identity
        self.kinds = kinds
        self.spans = spans
        self._content = 0
        self._sum = 0
        self.length = 0
        self.contents: list[int] = []
        self.more_contents: list[list[int]] = [[] for _ in kinds]
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self._content = self._next_content(self._content, token, self.length, self.more_contents)
        self._sum += self._content * _WEIGHTS[self.length]
        self.length += 1
        self.contents.append(self._content)

    def _next_content(self, content: int, token: int, position: int, more_contents: list[list[int]]) -> int:
        """Return the content of the next slot, and append the contents of further groups."""
        identity = identity_at(self.identity, self.spans, position)
        for index, (kind, contents) in enumerate(zip(self.kinds, more_contents, strict=True)):
            if isinstance(kind, RecurrentStates):
                contents.append(next_state(contents[-1] if contents else 0, content, token, position, identity))
            else:
                contents.append(slot_content(content, token, position, ~identity - index))
            content ^= read_content(contents[kind.first_position(position) :], position)
        return slot_content(content, token, position, identity)

    def block_contents(self, size: int) -> list[list[int]]:
        """Return the contents of each full block as a store keeps them: those of each group, in the order of groups."""
        of_tokens = [contents for kind, contents in self._groups if not isinstance(kind, RecurrentStates)]
        starts, groups = range(0, self.length // size * size, size), (self.contents, *of_tokens)
        return [[content for contents in groups for content in contents[i : i + size]] for i in starts]

    def states_after_blocks(self, size: int) -> list[int]:
        """Return the recurrent states after each block that another token follows."""
        states = [contents for kind, contents in self._groups if isinstance(kind, RecurrentStates)]
        return [contents[end - 1] for contents in states for end in range(size, self.length, size)]

    @property
    def _groups(self) -> list[tuple[KVGroupKind, list[int]]]:
        return [*zip(self.kinds, self.more_contents, strict=True)]

    def next_token(self) -> int:
        """Return the next token."""
        return self._sum % VOCAB_SIZE

    def accept(self, token: int) -> None:
        """Append a token."""
        self._append(token)

    def guess(self, count: int, error_rate: float, rng: random.Random, sampled: Sequence[int] = ()) -> list[int]:
        """Return the next tokens as a draft model would: each is wrong with probability `error_rate`.

        sampled: tokens after the accepted ones and before the draft.
        """
        content, total, length = self._content, self._sum, self.length
        more_contents = [contents[:] for contents in self.more_contents]
        tokens: list[int] = []
        for place in range(len(sampled) + count):
            if place < len(sampled):
                token = sampled[place]
            else:
                token = total % VOCAB_SIZE
                if rng.random() < error_rate:
                    token ^= 1
                tokens.append(token)
            content = self._next_content(content, token, length, more_contents)
            total += content * _WEIGHTS[length]
            length += 1
        return tokens


@dataclass(slots=True)
class Row:
    """The worker's state of a request."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int
    identity: int
    spans: Sequence[ContentSpan] = ()
    num_in_state: int = 0  # rows that the stored state includes
    kept: list[tuple[int, int, int]] = field(default_factory=list)  # content, token and identity of the rows after


class HashWorker:
    """Keeps blocks, tables and tokens exactly as the scheduler's outputs say.

    memory, host: contents by KV group, block and slot, on the device and in host memory. kinds: of the groups after the
    first.
    """

    def __init__(
        self,
        num_blocks: list[int],
        block_size: int,
        num_host_blocks: int,
        kinds: Sequence[KVGroupKind] = (),
        num_host_states: int = 0,
    ) -> None:
        self.block_size = block_size
        self.kinds = kinds
        self.memory = [[[POISON] * block_size for _ in range(count)] for count in num_blocks]
        self.host = [[[POISON] * block_size for _ in range(num_host_blocks)] for _ in num_blocks]
        if kinds and isinstance(kinds[-1], RecurrentStates):
            self.host[-1] = [[POISON] for _ in range(num_host_states)]
        self.rows: dict[str, Row] = {}
        self.identities: dict[str, int] = {}
        self.spans: dict[str, Sequence[ContentSpan]] = {}

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Do one step."""
        self._copy(scheduled)
        self._update(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        sampled: dict[str, list[int]] = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            saves = scheduled.state_saves.get(request_id, [])
            tokens = self._compute(self.rows[request_id], count, drafts.get(request_id, []), saves)
            if tokens:
                sampled[request_id] = tokens
                self.rows[request_id].tokens += tokens
        return ModelOutput(scheduled.step, sampled)

    def take_back(self, request_id: str, count: int) -> None:
        """Forget the last `count` sampled tokens of a request, because they are postponed."""
        del self.rows[request_id].tokens[-count:]

    def _copy(self, scheduled: SchedulerOutput) -> None:
        copies, memory = scheduled.copies, self.memory
        for group, block, host in copies.swap_out:
            self.host[group][host] = memory[group][block][:]
        for group, source, target in copies.block_copies:
            memory[group][target] = memory[group][source][:]
        for group, host, block in copies.swap_in:
            memory[group][block] = self.host[group][host][:]

    def _update(self, scheduled: SchedulerOutput) -> None:
        for request_id in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            self.rows.pop(request_id, None)
        for data in scheduled.scheduled_new_reqs:
            if data.request_id in self.rows:
                raise LookupError(f"{data.request_id} is sent whole, and is known")
            identity = self.identities[data.request_id]
            tables = [list(block_ids) for block_ids in data.block_ids]
            spans = self.spans.get(data.request_id, ())
            computed = data.num_computed_tokens
            self.rows[data.request_id] = Row(list(data.token_ids), tables, computed, identity, spans, computed)
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.rows[request_id].computed = computed
        for group, new_block_ids in enumerate(cached.new_block_ids):
            for request_id, block_ids in zip(cached.req_ids, new_block_ids, strict=True):
                self.rows[request_id].tables[group] += block_ids

    def _compute(self, row: Row, count: int, drafts: list[int], saves: list[tuple[int, int]]) -> list[int]:
        """Write `count` slots; return the model's own choices as far as they confirm the drafts, and one more.

        saves: (number of tokens, slot) of states.
        """
        size, blocks, table = self.block_size, self.memory[0], row.tables[0]
        start, tokens = row.computed, row.tokens + drafts
        content = blocks[table[(start - 1) // size]][(start - 1) % size] if start else 0
        self._drop_rows(row, start)
        for position in range(start, start + count):
            for index, kind in enumerate(self.kinds):
                if isinstance(kind, RecurrentStates):
                    row.kept.append((content, tokens[position], identity_at(row.identity, row.spans, position)))
                    content ^= read_content([self._states(row)[-1]], position)
                else:
                    content ^= self._read(row, index, kind, content, tokens[position], position)
            content = slot_content(content, tokens[position], position, identity_at(row.identity, row.spans, position))
            blocks[table[position // size]][position % size] = content
        num_known = len(row.tokens)
        self._write_states(row, min(start + count, num_known - 1), saves)
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

    def _drop_rows(self, row: Row, start: int) -> None:
        """Drop the kept rows from position `start` on: they were rejected, or are computed again."""
        row.kept = row.kept[: max(start - row.num_in_state, 0)]
        if row.num_in_state > start:
            row.num_in_state = POISON  # a state that includes later rows: no replay corrects it

    def _states(self, row: Row) -> list[int]:
        """Return the stored state of a row's sequence, and the states after the kept rows."""
        states = [self.memory[-1][row.tables[-1][0]][0] if row.num_in_state else 0]
        for position, (content, token, identity) in enumerate(row.kept, row.num_in_state):
            states.append(next_state(states[-1], content, token, position, identity))
        return states

    def _write_states(self, row: Row, num_certain: int, saves: list[tuple[int, int]]) -> None:
        """Store the state after `num_certain` rows, and the saved states."""
        if not (self.kinds and isinstance(self.kinds[-1], RecurrentStates)):
            return
        states, memory = self._states(row), self.memory[-1]
        for num_tokens, slot in saves:
            memory[slot][0] = states[num_tokens - row.num_in_state]
        memory[row.tables[-1][0]][0] = states[num_certain - row.num_in_state]
        row.kept = row.kept[num_certain - row.num_in_state :]
        row.num_in_state = num_certain

    def _read(self, row: Row, index: int, kind: KVGroupKind, content: int, token: int, position: int) -> int:
        """Write a slot's content in a further group; mix the contents that its row reads, through the group's table."""
        size, blocks, table = self.block_size, self.memory[index + 1], row.tables[index + 1]
        if table[position // size] < 0:
            raise IndexError(f"position {position} has no block in {table}")
        identity = identity_at(row.identity, row.spans, position)
        blocks[table[position // size]][position % size] = slot_content(content, token, position, ~identity - index)
        read = range(kind.first_position(position), position + 1)
        return read_content([blocks[table[i // size]][i % size] for i in read], position)

    def poison(self, block_ids: list[list[int]], host_block_ids: list[list[int]]) -> None:
        """Overwrite blocks without a holder, on the device and in host memory, by KV group."""
        blank = [POISON] * self.block_size
        for memory, ids in zip(self.memory, block_ids, strict=True):
            for block_id in ids:
                memory[block_id] = blank[:]
        for memory, ids in zip(self.host, host_block_ids, strict=True):
            for block_id in ids:
                memory[block_id] = blank[:]
