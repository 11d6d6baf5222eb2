"""The worker's requests, and the ragged batch of a step.

A step may be launched before the previous one is collected. A sampled, uncollected token is an awaited token. Instead
of its id, the host writes -(row + 1), which the device replaces by the row's last sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.kernels.interface import AttentionBatch, OutputRows
from octavo.worker.host_copies import SharedMemory
from octavo.worker.ragged import ranges, starts
from octavo.worker.sampler import SamplingColumns
from octavo.worker.state_rows import StateRows, saves_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
    from octavo.sampling_params import SamplingParams
    from octavo.structured_output.grammars import Matcher
    from octavo.worker.grammar_walks import Walk
    from octavo.worker.host_copies import HostCopies


@dataclass(slots=True, eq=False)
class RequestRow:
    """A request's data that is not in arrays. has_failed: True after an error; later results are discarded."""

    row: int
    request_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    cache_salt: str | None = None
    predicted_token_ids: NDArray[np.int32] | None = None
    matcher: Matcher | None = None  # dropped by a preemption
    walk: Walk | None = None
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One step, ready for the model, without padding.

    output_start    each request's first row of hidden states, then the total. A request has rows only for the tokens to
                    sample. With prompt logprobs or mean pooling, it has rows for all its tokens in this step
    sampled         indices of the `requests` to sample, which are those whose last known token this step computes
    cu_num_logits   int32 [len(sampled) + 1], each sampled request's first row of logits, then the total
    sampled_rows    int64 [num_logits], rows in the worker's arrays
    num_known       int64 [num_logits], number of tokens before the one to choose
    logits_indices  int64 [num_logits], rows of hidden states; None for all
    rows_there, known_there: `sampled_rows`, and `num_known` as int32, on the device
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    requests: list[RequestRow]
    output_start: NDArray[np.int64]
    sampled: list[int]
    cu_num_logits: NDArray[np.int32]
    sampled_rows: NDArray[np.int64]
    num_known: NDArray[np.int64]
    logits_indices: torch.Tensor | None
    rows_there: torch.Tensor
    known_there: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return self.token_ids.shape[0]


class InputBatch:
    """The worker's requests, one row each.

    Awaited tokens or drafts may follow known tokens. Only `append_sampled` makes sampled tokens known.
    block_tables: [max_num_seqs, blocks] per KV group, undefined for released blocks.
    num_changes: how often requests were removed or failed.
    num_position_dims: dimensions of a position; after the prompt, all dimensions continue from its largest position.
    num_kept_rows: of each request, if layers have recurrent states, otherwise 0. The last block table then has slots.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        copies: HostCopies | None = None,
        num_scratch_blocks: int = 0,
        num_groups: int = 1,
        num_position_dims: int = 1,
        num_kept_rows: int = 0,
    ) -> None:
        self._states = StateRows(max_num_seqs, num_kept_rows) if num_kept_rows else None
        copies = copies or SharedMemory()
        self.block_size = block_size
        self._tensors = copies.to_device_together
        self.requests: dict[str, RequestRow] = {}
        self.num_changes = 0
        # The last column is for the last token, which is never an input.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_position_dims = num_position_dims
        self._rotary_positions: dict[int, NDArray[np.int64]] = {}  # of prompts: [num_position_dims, num_tokens]
        most_blocks = -(-max_model_len // block_size) + num_scratch_blocks
        self.block_tables = [np.zeros((max_num_seqs, most_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._num_groups = num_groups - (num_kept_rows > 0)  # with a block for each position
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_awaited = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=copies.device)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.looks_at_prompt = np.zeros(max_num_seqs, dtype=bool)
        self.sampling = SamplingColumns(max_num_seqs, copies)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, scheduled: SchedulerOutput) -> None:
        """Apply a scheduler's output."""
        for request_id in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            self.remove_request(request_id)
        for data in scheduled.scheduled_new_reqs:
            self.add_request(data)
        self._update_cached(scheduled.scheduled_cached_reqs)

    def add_request(self, data: NewRequestData) -> None:
        """Add a request. Raises `ValueError`, without changes, for a wrong number of position dimensions."""
        if data.rotary_positions is not None and len(data.rotary_positions) != self.num_position_dims:
            raise ValueError(f"positions of {len(data.rotary_positions)} dimensions, not of {self.num_position_dims}")
        row, predicted = self._free_rows.pop(), data.predicted_token_ids
        self.requests[data.request_id] = RequestRow(
            row,
            data.request_id,
            data.num_prompt_tokens,
            data.sampling_params,
            data.stop_token_ids,
            data.cache_salt,
            None if predicted is None else np.array(predicted, dtype=np.int32),
        )
        self.sampling.set(row, data.sampling_params, data.seed, data.sample_index)
        self.num_tokens[row], self.num_blocks[:, row] = len(data.token_ids), 0
        self.token_ids[row, : len(data.token_ids)] = data.token_ids
        self.num_computed_tokens[row] = data.num_computed_tokens
        if self._states is not None:
            self._states.start(row, data.num_computed_tokens)
        if data.rotary_positions is not None:
            self._rotary_positions[row] = np.array(data.rotary_positions, dtype=np.int64)
        params = data.sampling_params
        self.looks_at_prompt[row] = params.prompt_logprobs is not None or params.pooling == "mean"
        for group, block_ids in enumerate(data.block_ids):
            self._append_blocks(group, row, block_ids)

    def remove_request(self, request_id: str) -> None:
        """Remove a known request."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._free_rows.append(request.row)
            self.num_awaited[request.row] = 0
            self._rotary_positions.pop(request.row, None)
            self.num_changes += 1
            if request.walk is not None:
                request.walk.result.cancel()

    def _update_cached(self, cached: CachedRequestData) -> None:
        rows = [self.requests[request_id].row for request_id in cached.req_ids]
        self.num_computed_tokens[rows] = cached.num_computed_tokens
        for group, new_block_ids in enumerate(cached.new_block_ids):
            for row, block_ids in zip(rows, new_block_ids, strict=True):
                if block_ids:
                    self._append_blocks(group, row, block_ids)

    def await_sampled(self, sampled_rows: torch.Tensor, sampled: torch.Tensor, rows: NDArray[np.int64]) -> None:
        """Make the next step feed the tokens that this step sampled.

        sampled_rows, sampled: distinct rows and their tokens, int64 [n] on the device. rows: the rows that get a token.
        """
        self.last_sampled.index_copy_(0, sampled_rows, sampled)
        self.token_ids[rows, self.num_tokens[rows] + self.num_awaited[rows]] = -1 - rows
        self.num_awaited[rows] += 1

    def end_awaiting(self, rows: NDArray[np.int64], left: Iterable[RequestRow]) -> None:
        """Decrement `num_awaited` of `rows`, except rows of removed requests in `left`: new requests may use them."""
        gone = [request.row for request in left if not self._has(request)]
        self.num_awaited[rows[~np.isin(rows, gone)] if gone else rows] -= 1

    def left_among(self, requests: Iterable[RequestRow]) -> list[RequestRow]:
        """Return removed or failed requests."""
        return [request for request in requests if request.has_failed or not self._has(request)]

    def _has(self, request: RequestRow) -> bool:
        return self.requests.get(request.request_id) is request

    def fail(self, requests: Iterable[RequestRow]) -> None:
        """Mark requests as failed."""
        for request in requests:
            request.has_failed = True
            self.num_changes += 1

    def append_sampled(self, sampled_token_ids: Mapping[str, list[int]]) -> None:
        """Append chosen tokens."""
        rows = np.array([self.requests[request_id].row for request_id in sampled_token_ids], dtype=np.int64)
        counts = np.array(list(map(len, sampled_token_ids.values())), dtype=np.int64)
        token_ids = list(chain.from_iterable(sampled_token_ids.values()))
        first = self.num_tokens[rows]
        if len(token_ids) == len(rows) and all(sampled_token_ids.values()):
            self.token_ids[rows, first] = token_ids
        else:
            self.token_ids[np.repeat(rows, counts), ranges(first, counts)] = token_ids
        self.num_tokens[rows] = first + counts

    def _append_blocks(self, group: int, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[group, row]
        self.block_tables[group][row, start : start + len(block_ids)] = block_ids
        self.num_blocks[group, row] += len(block_ids)

    def known_tokens(self, request: RequestRow) -> NDArray[np.int32]:
        """Return prompt and output."""
        return self.token_ids[request.row, : self.num_tokens[request.row]]

    def append_unsampled(self, request: RequestRow, token_ids: list[int]) -> NDArray[np.int32]:
        """Write tokens after the known tokens. Return a view of all these tokens."""
        start = int(self.num_tokens[request.row])
        self.token_ids[request.row, start : start + len(token_ids)] = token_ids
        return self.token_ids[request.row, : start + len(token_ids)]

    def input_tokens(self, inputs: ModelInputs) -> NDArray[np.int64]:
        """Return each logits row's input token."""
        return self.token_ids[inputs.sampled_rows, inputs.num_known - 1].astype(np.int64)

    def prepare_inputs(self, scheduled: SchedulerOutput) -> ModelInputs:
        """Gather a step's ragged batch.

        Requests with more tokens come first. Of equally many tokens, requests with the same first block are adjacent,
        so that attention reads shared blocks once.
        """
        requests = [self.requests[request_id] for request_id in scheduled.num_scheduled_tokens]
        counts = np.fromiter(scheduled.num_scheduled_tokens.values(), dtype=np.int64, count=len(requests))
        rows = np.array([request.row for request in requests], dtype=np.int64)
        if len(requests) > 1:
            order = np.lexsort((self.block_tables[0][rows, 0], -counts))
            requests, counts, rows = [requests[i] for i in order.tolist()], counts[order], rows[order]
        has_drafts = bool(scheduled.scheduled_spec_decode_tokens)
        num_drafts = self._write_drafts(requests, scheduled.scheduled_spec_decode_tokens) if has_drafts else 0
        computed = self.num_computed_tokens[rows]
        seq_lens = computed + counts
        num_fed = self.num_tokens[rows] + self.num_awaited[rows] + num_drafts
        num_logits = (seq_lens == num_fed) * (num_drafts + 1)
        sampled = num_logits.nonzero()[0]
        looks_at_prompt = self.looks_at_prompt[rows]
        num_outputs = np.where(looks_at_prompt, counts, num_logits) if looks_at_prompt.any() else num_logits
        output_start = starts(num_outputs)
        cu_num_logits = np.arange(len(sampled) + 1, dtype=np.int32)
        sampled_rows, num_known, logits_indices = rows[sampled], seq_lens[sampled], output_start[1:][sampled] - 1
        if has_drafts:
            num_logits = num_logits[sampled]
            num_logits.cumsum(out=cu_num_logits[1:])
            sampled_rows = np.repeat(sampled_rows, num_logits)
            num_known, logits_indices = (
                ranges(last - num_logits + 1, num_logits) for last in (num_known, logits_indices)
            )
        others = [sampled_rows, num_known.astype(np.int32)]
        if output_start[-1] != cu_num_logits[-1]:
            others.append(logits_indices)
        states: list[NDArray[np.generic]] = []
        if self._states is not None:
            saves = saves_of([request.request_id for request in requests], scheduled.state_saves)
            states = self._states.arrays(
                rows,
                computed,
                counts,
                num_known=self.num_tokens[rows] + self.num_awaited[rows],
                slots=self.block_tables[-1][rows, 0],
                saves=saves,
            )
        token_ids, attention, (rows_there, known_there, *indices) = self.gather(
            rows, computed, counts, output_start, others, num_groups=self._num_groups, states=states
        )
        return ModelInputs(
            token_ids=token_ids,
            attention=attention,
            requests=requests,
            output_start=output_start,
            sampled=sampled.tolist(),
            cu_num_logits=cu_num_logits,
            sampled_rows=sampled_rows,
            num_known=num_known,
            logits_indices=indices[0] if indices else None,
            rows_there=rows_there,
            known_there=known_there,
        )

    def gather(
        self,
        rows: NDArray[np.int64],
        first: NDArray[np.int64],
        counts: NDArray[np.int64],
        output_start: NDArray[np.int64],
        others: Sequence[NDArray[np.generic]] = (),
        *,
        num_groups: int,
        states: Sequence[NDArray[np.generic]] = (),
    ) -> tuple[torch.Tensor, AttentionBatch, list[torch.Tensor]]:
        """Return token ids and attention input of `counts` tokens per row from `first` on, and copies of `others`.

        All results are on the device. output_start: each request's first output row, then the total. A request's output
        rows are for its last tokens. states: see `StateRows.arrays`.
        """
        query_start = starts(counts)
        row_of_token, positions = rows, first
        if query_start[-1] > len(rows):
            row_of_token, positions = np.repeat(rows, counts), ranges(first, counts)
        seq_lens = first + counts
        width = -(-int(np.maximum.reduce(seq_lens)) // self.block_size)
        token_ids = self.token_ids[row_of_token, positions]
        arrays = [
            token_ids.astype(np.int64),
            *self._attention_arrays(query_start, seq_lens, rows, row_of_token, positions, width, num_groups),
        ]
        arrays += states
        is_cut = output_start[-1] < query_start[-1]
        if is_cut:
            num_outputs = np.diff(output_start)
            of_step = ranges(query_start[1:] - num_outputs, num_outputs)
            kept = np.flatnonzero(num_outputs)
            start = np.append(output_start[kept], output_start[-1])
            tokens = row_of_token[of_step], positions[of_step]
            arrays.append(of_step)
            arrays += self._attention_arrays(start, seq_lens[kept], rows[kept], *tokens, width, num_groups)
        tensors = iter(self._tensors([*arrays, *others]))
        fed = self._fed(token_ids, next(tensors))
        attention = self._attention(tensors, num_groups)
        if states:
            attention = replace(attention, states=StateRows.batch(tensors))
        if is_cut:
            outputs = OutputRows(next(tensors), self._attention(tensors, num_groups))
            attention = replace(attention, outputs=outputs)
        return fed, attention, list(tensors)

    def _fed(self, token_ids: NDArray[np.int32], fed: torch.Tensor) -> torch.Tensor:
        """Replace awaited tokens by their ids, or failed choices by 0."""
        if np.minimum.reduce(token_ids, initial=0) >= 0:
            return fed
        sampled = self.last_sampled[(-1 - fed).clamp(min=0)].clamp(min=0)
        return torch.where(fed < 0, sampled, fed)

    def draft_states(self, rows: NDArray[np.int64], first: NDArray[np.int64]) -> list[NDArray[np.generic]]:
        """Return the states of a pass that drafts with the states of this batch, for `gather`.

        first: position of each row's only token. Call it after `write_scratch_blocks`.
        """
        assert self._states is not None
        slots, scratch_slots = (self.block_tables[-1][rows, index] for index in (0, 1))
        return self._states.draft_arrays(rows, first, slots, scratch_slots, self.num_tokens[rows])

    def write_scratch_blocks(self, rows: NDArray[np.int64], block_ids: Sequence[NDArray[np.int32]]) -> None:
        """Append each KV group's scratch blocks [len(rows), n]."""
        for tables, num_blocks, ids in zip(self.block_tables, self.num_blocks, block_ids, strict=False):
            tables[rows[:, None], num_blocks[rows, None] + np.arange(ids.shape[1])] = ids

    def _write_drafts(self, requests: list[RequestRow], drafts: dict[str, list[int]]) -> NDArray[np.int64]:
        num_drafts = np.zeros(len(requests), dtype=np.int64)
        for index, request in enumerate(requests):
            token_ids = drafts.get(request.request_id, [])
            self.append_unsampled(request, token_ids)
            num_drafts[index] = len(token_ids)
        return num_drafts

    def _attention_arrays(
        self,
        query_start: NDArray[np.integer],
        seq_lens: NDArray[np.integer],
        rows: NDArray[np.int64],
        row_of_token: NDArray[np.int64],
        positions: NDArray[np.int64],
        width: int,
        num_groups: int,
    ) -> list[NDArray[np.generic]]:
        indices, offsets = positions // self.block_size, positions % self.block_size
        arrays: list[NDArray[np.generic]] = [query_start.astype(np.int32), seq_lens.astype(np.int32), positions]
        for tables in self.block_tables[:num_groups]:
            slots = tables[row_of_token, indices].astype(np.int64) * self.block_size + offsets
            arrays += [tables[rows, :width], slots]
        if self.num_position_dims > 1:
            arrays.append(self._rotary(query_start, rows, positions))
        return arrays

    def _rotary(
        self, query_start: NDArray[np.integer], rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        rotary = np.repeat(positions[None], self.num_position_dims, axis=0)
        for row, start, end in zip(rows.tolist(), query_start[:-1].tolist(), query_start[1:].tolist(), strict=True):
            known = self._rotary_positions.get(row)
            if known is not None:
                row_positions, num_known = positions[start:end], known.shape[1]
                after = row_positions + int(known.max()) + 1 - num_known
                rotary[:, start:end] = np.where(
                    row_positions < num_known, known[:, np.minimum(row_positions, num_known - 1)], after
                )
        return rotary

    def _attention(self, tensors: Iterator[torch.Tensor], num_groups: int) -> AttentionBatch:
        query_start, seq_lens, positions = islice(tensors, 3)
        batch = AttentionBatch(query_start, seq_lens, next(tensors), positions, next(tensors), self.block_size)
        if num_groups > 1:
            others = [
                replace(batch, block_tables=next(tensors), slot_mapping=next(tensors)) for _ in range(1, num_groups)
            ]
            batch = replace(batch, more_groups=tuple(others))
        if self.num_position_dims > 1:
            rotary = next(tensors)
            others = [replace(each, rotary_positions=rotary) for each in batch.more_groups]
            batch = replace(batch, more_groups=tuple(others), rotary_positions=rotary)
        return batch
