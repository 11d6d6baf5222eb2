"""Decode steps as graphs: the forward pass is captured for numbers of sequences, and launched with one call.

A step of some sequences takes the graph of the next number. Its inputs are copied to memory that stays, and the rows
behind them do nothing: token 0 at position 0 of a sequence of no length, whose keys and values have no slot. Every
launch follows from the graph's shape: the number of rows, and block tables as wide as the longest sequence may need.
Kernels compute a row alike whatever is launched around it, so a token is the same by a graph, by a larger one and
without.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.interface import AttentionBatch
from octavo.kernels.triton.graphs import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.kernels.interface import DecodePlan
    from octavo.kernels.triton.graphs import GraphPool

    Forward = Callable[[Tensor, AttentionBatch], Tensor]

logger = logging.getLogger(__name__)
_BLOCK = 1024
_PROGRESS_S = 5.0  # between lines of the log


class DecodeGraphs:
    """The forward pass of one model over one KV cache; decode steps of up to so many sequences by graphs.

    forward: the pass, launched kernel by kernel. sizes: numbers of sequences that were captured, ascending; none where
    the memory is too small for one. num_bytes: what they take, inputs and results included.
    """

    def __init__(self, forward: Forward, batch: AttentionBatch, plan: DecodePlan, pool: GraphPool) -> None:
        self.sizes: list[int] = []
        self.forward = forward
        self._inputs = DecodeInputs(batch, plan)
        self._replays: dict[int, Callable[[], None]] = {}
        self._result = torch.empty(0)
        self._pool = pool
        self._capture(plan)

    @property
    def num_bytes(self) -> int:
        """See above."""
        return self._inputs.num_bytes + self._result.nbytes + self._pool.num_bytes

    def _capture(self, plan: DecodePlan) -> None:
        """Capture from the largest size to the smallest, so that these find room in what that has taken.

        A graph with which the memory that was planned would be exceeded is dropped, and all smaller ones are left out.
        """
        start = told = time.monotonic()
        logger.info("capturing decode steps of up to %d requests as %d graphs", plan.sizes[-1], len(plan.sizes))
        for done, size in enumerate(reversed(plan.sizes)):
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                logger.info("captured %d of %d graphs", done, len(plan.sizes))
            try:
                replay = self._capture_size(size)
            except (CaptureError, torch.OutOfMemoryError) as error:
                logger.warning("no decode steps of %d requests or fewer are captured as graphs: %s", size, error)
                break
            if self.num_bytes > plan.num_bytes:
                logger.warning(
                    "%d of %d decode graphs fit into the %d bytes that were planned for them; steps of fewer than %s "
                    "requests are padded or launched kernel by kernel",
                    done, len(plan.sizes), plan.num_bytes, self.sizes[0] if self.sizes else "any",
                )  # fmt: skip
                break
            self.sizes.insert(0, size)
            self._replays[size] = replay
        seconds = time.monotonic() - start
        logger.info("decode graphs: %d, %d bytes, captured in %.1f s", len(self.sizes), self.num_bytes, seconds)

    def _capture_size(self, size: int) -> Callable[[], None]:
        token_ids, batch = self._inputs.of_size(size)
        self._inputs.fill(size, token_ids, batch)  # compiles it; padding is copied onto itself
        hidden = self.forward(token_ids, batch)  # compiles what no step has compiled: rows of padding alone
        if not len(self._result):
            self._result = torch.empty_like(hidden)
        result = self._result[:size]

        def run() -> None:
            result.copy_(self.forward(token_ids, batch))

        return self._pool.capture(run)

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Return hidden states of the batch's outputs, in memory that the next call overwrites."""
        size = self.size_for(batch)
        if size is None:
            return self.forward(token_ids, batch)
        self._inputs.fill(size, token_ids, batch)
        self._replays[size]()
        return self._result[: batch.seq_lens.shape[0]]

    def size_for(self, batch: AttentionBatch) -> int | None:
        """Return the size whose graph computes a batch; None for one with other rows than decodes, or too large."""
        num_seqs = batch.seq_lens.shape[0]
        index = bisect_left(self.sizes, num_seqs)
        is_decode = batch.outputs is None and batch.positions.shape[0] == num_seqs
        fits = index < len(self.sizes) and batch.block_tables.shape[1] <= self._inputs.table_width
        return self.sizes[index] if is_decode and fits else None


class DecodeInputs:
    """Inputs of the largest decode step, of which smaller ones take the first rows. They begin as padding."""

    def __init__(self, batch: AttentionBatch, plan: DecodePlan) -> None:
        most, device = plan.sizes[-1], batch.seq_lens.device
        self.table_width = plan.table_width
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._batch = AttentionBatch(
            query_start=torch.arange(most + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(most, dtype=torch.int32, device=device),
            block_tables=torch.zeros(most, plan.table_width, dtype=torch.int32, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            slot_mapping=torch.full((most,), -1, dtype=torch.int64, device=device),
            block_size=batch.block_size,
        )
        if batch.windowed is not None:
            tables, slots = torch.zeros_like(self._batch.block_tables), self._batch.slot_mapping.clone()
            windowed = replace(self._batch, block_tables=tables, slot_mapping=slots)
            self._batch = replace(self._batch, windowed=windowed)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        own, windowed = self._batch, self._batch.windowed
        tensors = [self._token_ids, own.query_start, own.seq_lens, own.block_tables, own.positions, own.slot_mapping]
        if windowed is not None:
            tensors += [windowed.block_tables, windowed.slot_mapping]
        return sum(each.nbytes for each in tensors)

    def of_size(self, size: int) -> tuple[Tensor, AttentionBatch]:
        """Return the token ids and the batch of a graph."""
        return self._token_ids[:size], _first_sequences(self._batch, size)

    def fill(self, size: int, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Copy a step, and pad it up to `size` rows."""
        windowed, own_windowed = batch.windowed or batch, self._batch.windowed or self._batch
        num_seqs, width = batch.block_tables.shape
        assert all(each.is_contiguous() for each in (token_ids, batch.block_tables, windowed.block_tables))
        _fill_inputs[size, triton.cdiv(width, _BLOCK)](
            token_ids, batch.positions, batch.seq_lens, batch.slot_mapping, batch.block_tables,
            windowed.slot_mapping, windowed.block_tables,
            self._token_ids, self._batch.positions, self._batch.seq_lens, self._batch.slot_mapping,
            self._batch.block_tables, own_windowed.slot_mapping, own_windowed.block_tables,
            num_seqs, width, self.table_width, HAS_WINDOWS=self._batch.windowed is not None, BLOCK=_BLOCK,
        )  # fmt: skip


def _first_sequences(batch: AttentionBatch, count: int) -> AttentionBatch:
    """Return the first sequences of a batch in which each has one row."""
    return AttentionBatch(
        query_start=batch.query_start[: count + 1],
        seq_lens=batch.seq_lens[:count],
        block_tables=batch.block_tables[:count],
        positions=batch.positions[:count],
        slot_mapping=batch.slot_mapping[:count],
        block_size=batch.block_size,
        windowed=None if batch.windowed is None else _first_sequences(batch.windowed, count),
    )


@triton.jit(do_not_specialize=["num_seqs", "width", "own_width"])
def _fill_inputs(
    token_ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, tables_ptr, window_slots_ptr, window_tables_ptr,
    own_token_ids_ptr, own_positions_ptr, own_seq_lens_ptr, own_slots_ptr, own_tables_ptr,
    own_window_slots_ptr, own_window_tables_ptr,
    num_seqs, width, own_width, HAS_WINDOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the inputs of one sequence, or make its row one that does nothing."""
    row = tl.program_id(0)
    is_there = row < num_seqs
    if tl.program_id(1) == 0:
        tl.store(own_token_ids_ptr + row, tl.load(token_ids_ptr + row, mask=is_there, other=0))
        tl.store(own_positions_ptr + row, tl.load(positions_ptr + row, mask=is_there, other=0))
        tl.store(own_seq_lens_ptr + row, tl.load(seq_lens_ptr + row, mask=is_there, other=0))
        tl.store(own_slots_ptr + row, tl.load(slots_ptr + row, mask=is_there, other=-1))
        if HAS_WINDOWS:
            tl.store(own_window_slots_ptr + row, tl.load(window_slots_ptr + row, mask=is_there, other=-1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_block = is_there & (column < width)
    source, place = row.to(tl.int64) * width + column, row.to(tl.int64) * own_width + column
    tl.store(own_tables_ptr + place, tl.load(tables_ptr + source, mask=is_block, other=0), mask=is_block)
    if HAS_WINDOWS:
        tables = tl.load(window_tables_ptr + source, mask=is_block, other=0)
        tl.store(own_window_tables_ptr + place, tables, mask=is_block)
