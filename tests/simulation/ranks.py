"""A worker of two ranks: rank 1 gets rank 0's messages, and must prepare the same inputs for each step.

Rank 1 is octavo's own code (`FollowingRunner` and `InputBatch`), except that its model computes nothing. A message can be
lost, doubled, delayed by one step, or have another number. Then rank 1 must refuse the next message that it gets, before
activations are exchanged. In a real engine, rank 0's deadline also ends the wait for a message that was lost.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.ranks import messages
from octavo.ranks.following_runner import FollowingRunner
from octavo.worker.input_batch import InputBatch
from octavo.worker.sampler import is_simple
from simulation.hash_model import HashWorker
from simulation.world import (
    SimulationError,
    draw_async,
    draw_config,
    draw_recurrent,
    draw_two_windows,
    draw_windowed,
    run_world,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import BlockCopies, NewRequestData, SchedulerOutput
    from octavo.kernels.interface import AttentionBatch, SamplingRows
    from octavo.worker.input_batch import ModelInputs
    from simulation.hash_model import Row
    from simulation.world import WorldConfig

FAULTS = ("lost", "doubled", "one step late", "with another number")
_MAX_MODEL_LEN = 4000
_NUM_SCRATCH_BLOCKS, _MOST_DRAFTS, _DRAFT_RATE = 3, 3, 0.5
_FAULT_RATE = 0.05  # of each message, until the fault has happened once


class RankFailedError(Exception):
    """Rank 1 noticed the fault, which ends the engine."""


def draw_ranked(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw a configuration with two ranks, which end after any failed step, and postpone no tokens of steps ahead."""
    draw = rng.choice([draw_config, draw_config, draw_windowed, draw_two_windows, draw_async, draw_recurrent])
    return _on_ranks(draw(rng, num_steps))


def draw_ranked_recurrent(rng: random.Random, num_steps: int = 300) -> WorldConfig:
    """Draw such a configuration of a model with recurrent layers."""
    return _on_ranks(draw_recurrent(rng, num_steps))


def _on_ranks(config: WorldConfig) -> WorldConfig:
    postpone_rate = 0.0 if config.async_scheduling else config.postpone_rate
    return replace(config, has_ranks=True, step_failure_rate=0.0, remote_rate=0.0, postpone_rate=postpone_rate)


def notices_fault(seed: str, fault: str) -> bool:
    """Run a world with a fault of messages. Return False if the world ended before or with the step of the fault.

    Raises `SimulationError` if rank 1 computed a step after the fault.
    """
    try:
        run_world(seed, replace(draw_ranked(random.Random(seed)), message_fault=fault))
    except RankFailedError:
        return True
    return False


class RankedWorker(HashWorker):
    """Rank 0, rank 1, and the messages between them."""

    def __init__(self, seed: str, config: WorldConfig, num_blocks: list[int]) -> None:
        super().__init__(num_blocks, config.block_size, config.num_host_blocks, config.kinds, config.num_host_states)
        self._has_states = config.has_states
        self._stored: list[int] = []  # rows in the state of each request of a step, before the step
        self._kept: dict[int, tuple[str, int, int]] = {}  # rank 1's kept rows: request, position, token
        self._fault, self._rng = config.message_fault, random.Random(seed + "messages")
        self._has_fault = False
        self._num_messages = self._num_passes = 0
        self._sampled: dict[str, list[int]] = {}
        self._scored: dict[str, int] = {}  # number of prompt tokens of requests with log probabilities of the prompt
        self._data: dict[str, NewRequestData] = {}
        self._late: list[bytes] = []
        batch = _WatchedBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=_MAX_MODEL_LEN,
            block_size=config.block_size,
            num_groups=len(num_blocks),
            num_scratch_blocks=_NUM_SCRATCH_BLOCKS,
            num_kept_rows=(1 + config.max_drafts) * config.has_states,
        )
        self._rank = _Rank(batch)
        self._drafter = _Drafter(batch, num_blocks)
        self._num_drafts = _MOST_DRAFTS if config.postpone_rate == 0 and not config.has_states else 0
        count = config.max_num_seqs * _NUM_SCRATCH_BLOCKS
        scratch = [size + np.arange(count, dtype=np.int32).reshape(-1, _NUM_SCRATCH_BLOCKS) for size in num_blocks]
        parts: Any = self._rank, batch, lambda _: None, self._drafter, scratch
        self._runner = FollowingRunner(*parts)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Do one step on both ranks. Raises `RankFailedError` if rank 1 noticed a fault."""
        self._num_messages += 1
        step = messages.Step.of(self._num_messages, scheduled, self._sampled)
        for data in scheduled.scheduled_new_reqs:
            self._data[data.request_id] = data
            self._scored.pop(data.request_id, None)
            if data.sampling_params.prompt_logprobs is not None:
                self._scored[data.request_id] = data.num_prompt_tokens
        is_faulty = not self._arrives(step)
        if not is_faulty and self._rank.copies != [scheduled.copies]:
            raise SimulationError(f"rank 1 copied {self._rank.copies} instead of {scheduled.copies}")
        self._rank.copies.clear()
        self._stored.clear()
        result = super().execute(scheduled)
        if scheduled.num_scheduled_tokens and not is_faulty:
            self._num_passes += 1
            if self._rank.num_passes != self._num_passes:
                raise SimulationError(f"rank 1 did {self._rank.num_passes} passes, and rank 0 {self._num_passes}")
            self._compare(scheduled, result.sampled_token_ids)
            if self._has_states:
                self._compare_states(scheduled, result.sampled_token_ids)
        self._sampled = {request_id: list(tokens) for request_id, tokens in result.sampled_token_ids.items()}
        if not self._has_fault and self._rng.random() < _DRAFT_RATE:
            self._draft([name for name in self._sampled if name in self._rank.batch.requests])
        return result

    def _compute(self, row: Row, count: int, drafts: list[int], saves: list[tuple[int, int]]) -> list[int]:
        self._stored.append(row.num_in_state)
        return super()._compute(row, count, drafts, saves)

    def _draft(self, names: list[str]) -> None:
        """Send passes of a draft model, as for a random part of the requests. Each pass adds a guess."""
        guesses: dict[str, list[int]] = {name: [] for name in names if self._rng.random() < 0.7}
        for _ in range(self._rng.randint(0, self._num_drafts) if guesses else 0):
            places = {name: len(self.rows[name].tokens) - 1 + len(found) for name, found in guesses.items()}
            tokens = [(self.rows[name].tokens + found)[places[name]] for name, found in guesses.items()]
            self._num_messages += 1
            draft = messages.Draft(self._num_messages, [*guesses], tokens, [*places.values()], self._sampled)
            if not self._arrives(draft):
                return
            self._sampled = {}
            self._compare_drafts(places, tokens)
            for found in guesses.values():
                found.append(self._rng.randrange(1000))

    def _compare_drafts(self, places: dict[str, int], tokens: list[int]) -> None:
        attention = self._drafter.attention
        for index, (name, position) in enumerate(places.items()):
            scratch = self._rank.batch.requests[name].row * _NUM_SCRATCH_BLOCKS
            expected = [tokens[index], position + 1]
            found = [int(self._drafter.token_ids[index]), int(attention.seq_lens[index])]
            for group, table in enumerate(self.rows[name].tables):
                with_scratch = [*table, *(len(self.memory[group]) + scratch + i for i in range(_NUM_SCRATCH_BLOCKS))]
                place, offset = divmod(position, self.block_size)
                expected.append(with_scratch[place] * self.block_size + offset)
                found.append(int(attention.of_group(group).slot_mapping[index]))
            if found != expected:
                raise SimulationError(f"rank 1 drafts for {name} with {found} instead of {expected}")

    def _arrives(self, message: messages.Step | messages.Draft) -> bool:
        """Deliver a message. Return False if it is lost. Raises `RankFailedError` if rank 1 notices a fault."""
        received = self._delivered(messages.encode(message))
        try:
            for each in received:
                self._runner.compute(_decoded(each))
        except ValueError as error:
            if self._has_fault:
                raise RankFailedError from error
            raise SimulationError(f"rank 1 refuses a message that is right: {error}") from error
        if self._has_fault and received:
            raise SimulationError(f"rank 1 computed a step after a message was {self._fault}")
        return bool(received)

    def take_back(self, request_id: str, count: int) -> None:
        """See `HashWorker`. A real rank 0 does not send postponed tokens."""
        super().take_back(request_id, count)
        kept = self._sampled.pop(request_id)[:-count]
        self._sampled |= {request_id: kept} if kept else {}

    def _delivered(self, message: bytes) -> list[bytes]:
        late, self._late = self._late, []
        if self._fault is None or self._has_fault or self._rng.random() >= _FAULT_RATE:
            return [message, *late]
        self._has_fault = True
        if self._fault == "one step late":
            self._late.append(message)
        if self._fault == "with another number":
            step = _decoded(message)
            other = messages.msgspec.structs.replace(step, number=step.number + self._rng.choice([-1, 1, 1000]))
            return [messages.encode(other)]
        return [message] * {"lost": 0, "one step late": 0, "doubled": 2}[self._fault]

    def _compare(self, scheduled: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Raise `SimulationError` if rank 1's newest inputs differ from rank 0's state."""
        inputs = self._rank.batch.newest_inputs()
        sampling: list[tuple[NewRequestData, int]] = []
        start, num_logits, num_scored = 0, 0, list[int]()
        for index, request in enumerate(inputs.requests):
            name, row = request.request_id, self.rows[request.request_id]
            positions = range(row.computed, row.computed + scheduled.num_scheduled_tokens[name])
            known = row.tokens[: len(row.tokens) - len(sampled.get(name, []))]
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, [])
            is_sampled = positions.stop >= len(known)
            num_logits += is_sampled * (1 + len(drafts))
            sampling += [(self._data[name], len(known))] * is_sampled
            if name in self._scored and row.computed < self._scored[name] - 1:
                num_scored.append(min(len(positions), self._scored[name] - 1 - row.computed))
            expected = [
                [(known + drafts)[position] for position in positions],
                [*positions],
                is_sampled,
                *(self._places(table, group, positions) for group, table in enumerate(self._tables(row))),
            ]
            end = start + len(positions)
            found = [
                inputs.token_ids[start:end].tolist(),
                inputs.attention.positions[start:end].tolist(),
                index in inputs.sampled,
                *(
                    self._places_found(each, index, group, range(start, end), positions)
                    for group, each in enumerate((inputs.attention, *inputs.attention.more_groups))
                ),
            ]
            if found != expected:
                raise SimulationError(f"{name}: rank 1 has {found} instead of {expected}")
            start = end
        if not start == scheduled.total_num_scheduled_tokens == inputs.num_tokens:
            raise SimulationError(f"rank 1 computes {inputs.num_tokens} rows instead of {start}")
        sampled_here = num_logits == len(sampling) and all(is_simple(data.sampling_params) for data, _ in sampling)
        expected_logits = num_scored + [num_logits] * (num_logits > 0 and not sampled_here)
        if self._rank.num_logits != expected_logits:
            raise SimulationError(
                f"rank 1 computes logits of {self._rank.num_logits} rows instead of {expected_logits}"
            )
        rows = [
            (np.float32(data.sampling_params.temperature), data.seed, data.sample_index, num_known)
            for data, num_known in sampling
            if sampled_here
        ]
        if self._rank.sampling != rows:
            raise SimulationError(f"rank 1 samples with {self._rank.sampling} instead of {rows}")

    def _compare_states(self, scheduled: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Raise `SimulationError` if rank 1 advances, saves or keeps other states than rank 0."""
        inputs = self._rank.batch.newest_inputs()
        states = inputs.attention.states
        if states is None:
            raise SimulationError("rank 1 advances no states")
        names = [request.request_id for request in inputs.requests]
        of_row = [name for name in names for _ in range(scheduled.num_scheduled_tokens[name])]
        columns = inputs.attention.positions.tolist(), inputs.token_ids.tolist()
        rows = list(zip(of_row, *columns, strict=True))
        sources = [self._kept[-1 - each] if each < 0 else rows[each] for each in states.sources.tolist()]
        starts, saved = states.query_start.tolist(), (states.saved_rows.tolist(), states.saved_slots.tolist())
        slots = states.read_slots.tolist(), states.write_slots.tolist(), states.write_rows.tolist()
        kept: list[tuple[str, int, int]] = []
        stored = dict(zip(scheduled.num_scheduled_tokens, self._stored, strict=True))
        for name, first, end, *found in zip(names, starts[:-1], starts[1:], *slots, strict=True):
            row, before, drafts = self.rows[name], stored[name], scheduled.scheduled_spec_decode_tokens.get(name, [])
            known = row.tokens[: len(row.tokens) - len(sampled.get(name, []))] + drafts
            computed = row.computed + scheduled.num_scheduled_tokens[name]
            slot, num_new = row.tables[-1][0], row.num_in_state - before
            expected = [slot if before else -1, slot if num_new else -1, num_new]
            saves = [(before + at + 1 - first, to) for at, to in zip(*saved, strict=True) if first <= at < end]
            if found != expected or saves != scheduled.state_saves.get(name, []):
                raise SimulationError(f"{name}: rank 1 has states {found} and saves {saves} instead of {expected}")
            if sources[first:end] != [(name, position, known[position]) for position in range(before, computed)]:
                raise SimulationError(f"{name}: rank 1 advances the state by {sources[first:end]} from {before} on")
            kept += [(name, position, known[position]) for position in range(row.num_in_state, computed)]
        if [rows[each] for each in states.keep_from.tolist()] != kept:
            raise SimulationError(f"rank 1 keeps {[rows[each] for each in states.keep_from.tolist()]} and not {kept}")
        self._kept |= dict(zip(states.keep_to.tolist(), kept, strict=True))

    def _tables(self, row: Row) -> list[list[int]]:
        """Return the block tables of a request, without its slot."""
        return row.tables[:-1] if self._has_states else row.tables

    def _places(self, table: list[int], group: int, positions: range) -> tuple[list[int], list[int]]:
        """Return the slots to write, and the blocks to read."""
        size = self.block_size
        slots = [table[position // size] * size + position % size for position in positions]
        return slots, [table[block] for block in self._blocks_read(group, positions)]

    def _places_found(
        self, attention: AttentionBatch, index: int, group: int, rows: range, positions: range
    ) -> tuple[list[int], list[int]]:
        blocks = attention.block_tables[index].tolist()
        slots = attention.slot_mapping[rows.start : rows.stop].tolist()
        return slots, [blocks[block] for block in self._blocks_read(group, positions)]

    def _blocks_read(self, group: int, positions: range) -> range:
        first = self.kinds[group - 1].first_position(positions.start) if group else 0
        return range(first // self.block_size, (positions.stop - 1) // self.block_size + 1)


def _decoded(message: bytes) -> messages.Step | messages.Draft:
    step = messages.decode_to_rank(message)
    if not isinstance(step, messages.Step | messages.Draft):
        raise SimulationError(f"rank 0 sent {step} instead of a step")
    return step


class _WatchedBatch(InputBatch):
    """Keeps the newest inputs."""

    _newest: ModelInputs | None = None

    def prepare_inputs(self, scheduled: SchedulerOutput) -> ModelInputs:
        self._newest = super().prepare_inputs(scheduled)
        return self._newest

    def newest_inputs(self) -> ModelInputs:
        if self._newest is None:
            raise SimulationError("rank 1 has prepared no inputs")
        return self._newest


class _Rank:
    """Rank 1's model, KV cache and forward pass. It records calls."""

    sampled_borders = (0, 64, 128)

    def __init__(self, batch: _WatchedBatch) -> None:
        self.model = self.kv_cache = self
        self.batch = batch
        self.num_passes = 0
        self.copies: list[BlockCopies] = []
        self.num_logits: list[int] = []
        self.sampling: list[tuple[np.float32, int, int, int]] = []  # temperature, seed, sample index, position

    def copy(self, copies: BlockCopies) -> None:
        self.copies.append(copies)

    def __call__(self, token_ids: torch.Tensor, attention: AttentionBatch) -> torch.Tensor:
        self.num_passes += 1
        self.num_logits.clear()
        self.sampling.clear()
        return torch.zeros(int(self.batch.newest_inputs().output_start[-1]), 1)

    def compute_logits(self, rows: torch.Tensor) -> None:
        self.num_logits.append(len(rows))

    def sample_columns(self, hidden: torch.Tensor, rows: SamplingRows) -> None:
        columns = rows.temperature.numpy(), rows.seed.tolist(), rows.sample_index.tolist(), rows.position.tolist()
        self.sampling = list(zip(*columns, strict=True))
        if len(hidden) != len(self.sampling):
            raise SimulationError(f"rank 1 samples from {len(hidden)} rows for {len(self.sampling)} requests")


class _Drafter:
    """Rank 1's draft model and its forward pass. It records inputs."""

    token_ids: torch.Tensor
    attention: AttentionBatch

    def __init__(self, batch: _WatchedBatch, num_blocks: Sequence[int]) -> None:
        self.model = self.kv_cache = self
        self.batch = batch
        self.groups_of_tokens, self.states = num_blocks, None

    def __call__(self, token_ids: torch.Tensor, attention: AttentionBatch) -> torch.Tensor:
        self.token_ids, self.attention = token_ids, attention
        return torch.zeros(len(token_ids), 1)

    def compute_logits(self, rows: torch.Tensor) -> None:
        if len(rows) != len(self.token_ids):
            raise SimulationError(f"rank 1 computes {len(rows)} rows of logits for {len(self.token_ids)} drafts")
