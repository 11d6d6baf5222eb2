"""Decode steps as graphs, each for a number of sequences and a mean number of rows per sequence.

A step copies its inputs to the memory of the next larger graph. Unused sequences get one padding row each while unused
rows remain. With exact kernels, bits do not depend on padding, so graphs do not change tokens.

Steps with prompts use the same graphs, because only inputs assign rows to sequences. In a graph of 120 sequences, a
prompt of 100 tokens may have 100 rows of one sequence, next to 20 decodes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from octavo.kernels.interface import AttentionBatch
from octavo.kernels.triton.graphs import CaptureError
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.matmul import BLOCK_M
from octavo.kernels.triton.rows import take_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.kernels.interface import DecodePlan
    from octavo.kernels.triton.graphs import GraphPool

    Forward = Callable[[Tensor, AttentionBatch], Tensor]
    Size = tuple[int, int]  # (mean rows per sequence, sequences)

logger = logging.getLogger(__name__)
_BLOCK = 1024
_PROGRESS_S = 5.0
_MOST_PADDING = 1.5  # most rows of a graph per row of a mixed step; one tile of products is never too much


class DecodeGraphs:
    """A forward pass over one KV cache, with graphs for few rows per sequence.

    sizes: captured numbers of sequences by maximum mean rows per sequence.
    """

    def __init__(self, forward: Forward, batch: AttentionBatch, plan: DecodePlan, pool: GraphPool) -> None:
        self.sizes: dict[int, list[int]] = {num_rows: [] for num_rows in plan.sizes}
        self.forward = forward
        self._inputs = DecodeInputs(batch, plan)
        self._replays: dict[Size, Callable[[], None]] = {}
        self._result = torch.empty(0)
        self._pool = pool
        self._capture(plan)

    @property
    def num_bytes(self) -> int:
        """Bytes with inputs."""
        return self._inputs.num_bytes + self._result.nbytes + self._pool.num_bytes

    def _capture(self, plan: DecodePlan) -> None:
        """Capture graphs within `plan.num_bytes`, largest first, because smaller ones reuse memory."""
        start = logged_at = time.monotonic()
        planned = [(num_rows, num_seqs) for num_rows, sizes in plan.sizes.items() for num_seqs in sizes]
        planned.sort(key=lambda size: (size[0] * size[1], size[0]), reverse=True)
        logger.info("capturing steps of up to %d rows as %d graphs", planned[0][0] * planned[0][1], len(planned))
        for done, size in enumerate(planned):
            if time.monotonic() - logged_at > _PROGRESS_S:
                logged_at = time.monotonic()
                logger.info("captured %d of %d graphs", done, len(planned))
            try:
                replay = self._capture_size(size)
            except (CaptureError, torch.OutOfMemoryError) as error:
                logger.warning("steps of up to %d rows are not captured as graphs: %s", size[0] * size[1], error)
                break
            if self.num_bytes > plan.num_bytes:
                logger.warning(
                    "only %d of %d decode graphs fit into %d bytes; other steps are padded to a larger graph or "
                    "launched kernel by kernel",
                    done, len(planned), plan.num_bytes,
                )  # fmt: skip
                break
            self.sizes[size[0]].insert(0, size[1])
            self._replays[size] = replay
        seconds = time.monotonic() - start
        logger.info("decode graphs: %d, %d bytes, captured in %.1f s", len(self._replays), self.num_bytes, seconds)

    def _capture_size(self, size: Size) -> Callable[[], None]:
        token_ids, batch = self._inputs.of_size(size)
        self._inputs.fill(size, token_ids[:0], _first_of(batch, 0, 0))  # compiles the kernel
        hidden = self.forward(token_ids, batch)
        if not len(self._result):
            self._result = torch.empty_like(hidden)
        result = self._result[: len(hidden)]

        def run() -> None:
            result.copy_(self.forward(token_ids, batch))

        return self._pool.capture(run)

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """See `Kernels.record_forward`."""
        size = self.size_for(batch)
        if size is None:
            return self.forward(token_ids, batch)
        self._inputs.fill(size, token_ids, batch)
        self._replays[size]()
        hidden = self._result[: batch.positions.shape[0]]
        return hidden if batch.outputs is None else take_rows(hidden, batch.outputs.rows)

    def size_for(self, batch: AttentionBatch) -> Size | None:
        """Return the size of the graph for a batch, or None. Of rows, only the total matters."""
        num_rows, (num_seqs, width) = batch.positions.shape[0], batch.block_tables.shape
        if width > self._inputs.table_width:
            return None
        for mean, sizes in self.sizes.items():
            index = bisect_left(sizes, num_seqs)
            if index < len(sizes) and num_rows <= mean * num_seqs:
                return mean, sizes[index]
        return self._size_for_mixed(num_rows, num_seqs)

    def _size_for_mixed(self, num_rows: int, num_seqs: int) -> Size | None:
        """Return a graph with more sequences than a step, and enough rows.

        Its mean is the largest, because attention then splits sequences of several rows, too.
        """
        mean, sizes = next(reversed(self.sizes.items()))
        index = bisect_left(sizes, max(num_seqs, cdiv(num_rows, mean)))
        if index < len(sizes) and mean * sizes[index] <= max(BLOCK_M, _MOST_PADDING * num_rows):
            return mean, sizes[index]
        return None


class DecodeInputs:
    """Inputs, of which smaller graphs use a prefix."""

    def __init__(self, batch: AttentionBatch, plan: DecodePlan) -> None:
        most_seqs = max(sizes[-1] for sizes in plan.sizes.values())
        most_rows = max(num_rows * sizes[-1] for num_rows, sizes in plan.sizes.items())
        device = batch.seq_lens.device
        self.table_width = plan.table_width
        self._token_ids = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._batch = AttentionBatch(
            query_start=torch.zeros(most_seqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(most_seqs, dtype=torch.int32, device=device),
            block_tables=torch.zeros(most_seqs, plan.table_width, dtype=torch.int32, device=device),
            positions=torch.zeros(most_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((most_rows,), -1, dtype=torch.int64, device=device),
            block_size=batch.block_size,
        )
        first = self._batch
        more_groups = (
            replace(first, block_tables=first.block_tables.clone(), slot_mapping=first.slot_mapping.clone())
            for _ in batch.more_groups
        )
        self._batch = replace(first, more_groups=tuple(more_groups))

    @property
    def num_bytes(self) -> int:
        """Bytes in total."""
        of_graph = self._batch
        tensors = [self._token_ids, of_graph.query_start, of_graph.seq_lens, of_graph.positions]
        for group in (of_graph, *of_graph.more_groups):
            tensors += [group.block_tables, group.slot_mapping]
        return sum(each.nbytes for each in tensors)

    def of_size(self, size: Size) -> tuple[Tensor, AttentionBatch]:
        """Return graph inputs."""
        num_rows, num_seqs = size
        batch = _first_of(self._batch, num_seqs, num_rows * num_seqs, has_padding_rows=num_rows > 1)
        return self._token_ids[: num_rows * num_seqs], batch

    def fill(self, size: Size, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Copy with padding."""
        num_rows, num_seqs = size
        width = batch.block_tables.shape[1]
        assert token_ids.is_contiguous()
        groups = zip((batch, *batch.more_groups), (self._batch, *self._batch.more_groups), strict=True)
        for given, of_graph in groups:  # repeated copies of token ids are cheaper than another launch
            assert given.block_tables.is_contiguous()
            _fill_inputs[num_rows * num_seqs, cdiv(width, _BLOCK)](
                token_ids, given.positions, given.slot_mapping, given.query_start, given.seq_lens, given.block_tables,
                self._token_ids, of_graph.positions, of_graph.slot_mapping, of_graph.query_start, of_graph.seq_lens,
                of_graph.block_tables,
                token_ids.shape[0], given.seq_lens.shape[0], num_rows * num_seqs, num_seqs, width, self.table_width,
                BLOCK=_BLOCK, enable_fp_fusion=False,
            )  # fmt: skip


def _first_of(batch: AttentionBatch, num_seqs: int, num_rows: int, *, has_padding_rows: bool = False) -> AttentionBatch:
    return AttentionBatch(
        query_start=batch.query_start[: num_seqs + 1],
        seq_lens=batch.seq_lens[:num_seqs],
        block_tables=batch.block_tables[:num_seqs],
        positions=batch.positions[:num_rows],
        slot_mapping=batch.slot_mapping[:num_rows],
        block_size=batch.block_size,
        more_groups=tuple(
            _first_of(each, num_seqs, num_rows, has_padding_rows=has_padding_rows) for each in batch.more_groups
        ),
        has_padding_rows=has_padding_rows,
    )


@kernel(do_not_specialize=["num_rows", "num_seqs", "graph_num_rows", "graph_num_seqs", "width", "graph_width"])
def _fill_inputs(
    token_ids_ptr, positions_ptr, slots_ptr, query_start_ptr, seq_lens_ptr, tables_ptr,
    graph_token_ids_ptr, graph_positions_ptr, graph_slots_ptr, graph_query_start_ptr, graph_seq_lens_ptr,
    graph_tables_ptr,
    num_rows, num_seqs, graph_num_rows, graph_num_seqs, width, graph_width, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    is_sequence = index < num_seqs
    if tl.program_id(1) == 0:
        is_row = index < num_rows
        tl.store(graph_token_ids_ptr + index, tl.load(token_ids_ptr + index, mask=is_row, other=0))
        tl.store(graph_positions_ptr + index, tl.load(positions_ptr + index, mask=is_row, other=0))
        tl.store(graph_slots_ptr + index, tl.load(slots_ptr + index, mask=is_row, other=-1))
        is_of_graph = index < graph_num_seqs
        end = tl.load(query_start_ptr + index + 1, mask=is_sequence, other=0)
        behind = tl.minimum(num_rows + index + 1 - num_seqs, graph_num_rows)
        tl.store(graph_query_start_ptr + index + 1, tl.where(is_sequence, end, behind), mask=is_of_graph)
        length = tl.load(seq_lens_ptr + index, mask=is_sequence, other=0)
        tl.store(graph_seq_lens_ptr + index, length, mask=is_of_graph)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_block = is_sequence & (column < width)
    source, place = index.to(tl.int64) * width + column, index.to(tl.int64) * graph_width + column
    tl.store(graph_tables_ptr + place, tl.load(tables_ptr + source, mask=is_block, other=0), mask=is_block)
