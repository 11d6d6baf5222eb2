"""The state space model of Mamba-2 on a GPU, computed like the gated delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.state_batch import STATE_COLUMNS
from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.gated_delta import LANES_PER_WARP
from octavo.kernels.triton.launch import kernel, power_of_2_from
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.reductions import sum_in_halves
from octavo.kernels.triton.rounding import round_to
from octavo.kernels.triton.states import first_not_below, load_inputs, softplus, write_after, write_state

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch


def mamba2(
    xbc: Tensor,
    dt: Tensor,
    kept_xbc: Tensor,
    kept_dt: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    batch: StateBatch,
    num_groups: int,
    out: Tensor,
) -> None:
    """See `octavo.kernels.operations.mamba2`."""
    num_heads, num_blocks, depth = state.shape[1:4]
    lanes = power_of_2_from(depth)
    _mamba2[len(batch.read_slots), num_heads, num_blocks](
        xbc, dt, kept_xbc, kept_dt, dt_bias, decay, skip, state, out,
        batch.query_start, batch.sources, batch.read_slots, batch.write_slots, batch.write_rows, batch.saved_rows,
        batch.saved_slots, len(batch.saved_rows),
        xbc.stride(0), dt.stride(0), kept_xbc.stride(0), kept_dt.stride(0), state.stride(0), out.stride(0),
        float(dt_min), float(dt_max), GROUPS=num_groups, DEPTH=depth, LANES=lanes, LEVELS=lanes.bit_length() - 1,
        COLUMNS=STATE_COLUMNS, num_warps=max(1, lanes // LANES_PER_WARP), enable_fp_fusion=False,
    )  # fmt: skip


@kernel(do_not_specialize=["num_saved"])
def _mamba2(
    xbc_ptr, dt_ptr, kept_xbc_ptr, kept_dt_ptr, dt_bias_ptr, decay_ptr, skip_ptr, state_ptr, out_ptr,
    query_start_ptr, sources_ptr, read_slots_ptr, write_slots_ptr, write_rows_ptr, saved_rows_ptr, saved_slots_ptr,
    num_saved, xbc_stride, dt_stride, kept_xbc_stride, kept_dt_stride, slot_stride, out_stride, dt_min, dt_max,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_blocks = tl.num_programs(1), tl.num_programs(2)
    width = num_heads * num_blocks * COLUMNS
    lane, column = tl.arange(0, LANES)[None, :], tl.arange(0, COLUMNS)[:, None]
    is_there, is_column = lane < DEPTH, column < COLUMNS
    state_ptr += ((head * num_blocks + block) * DEPTH + lane) * COLUMNS + column
    x_column = (head * num_blocks + block) * COLUMNS + column
    key_column = width + head // (num_heads // GROUPS) * DEPTH + lane
    first, end = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    read_slot, write_slot = tl.load(read_slots_ptr + sequence), tl.load(write_slots_ptr + sequence)
    write_rows = tl.load(write_rows_ptr + sequence)
    is_stored = is_there & (read_slot >= 0)
    state = tl.load(state_ptr + read_slot.to(tl.int64) * slot_stride, mask=is_stored, other=0.0)
    dt_bias, decay, skip = tl.load(dt_bias_ptr + head), tl.load(decay_ptr + head), tl.load(skip_ptr + head)
    saved = first_not_below(saved_rows_ptr, num_saved, first)
    if write_rows == 0:
        write_state(state_ptr, write_slot, slot_stride, state, is_there)
    for row in range(loop_bound(first), loop_bound(end)):
        source = tl.load(sources_ptr + row).to(tl.int64)
        xbc = xbc_ptr, xbc_stride, kept_xbc_ptr, kept_xbc_stride, source
        x = load_inputs(*xbc, x_column, is_column).to(tl.float32)
        key = load_inputs(*xbc, key_column, is_there).to(tl.float32)
        query = load_inputs(*xbc, key_column + GROUPS * DEPTH, is_there).to(tl.float32)
        dt = load_inputs(dt_ptr, dt_stride, kept_dt_ptr, kept_dt_stride, source, head, head < num_heads)
        size = softplus(dt.to(tl.float32) + dt_bias)
        size = tl.where(size < dt_min, dt_min, tl.where(size > dt_max, dt_max, size))  # NaN stays
        state = state * exponential(size * decay) + key * (size * x)
        result = sum_in_halves(state * query, COLUMNS, LEVELS)[:, None] + skip * x
        place = out_ptr + source * out_stride + x_column
        tl.store(place, round_to(result, out_ptr.dtype.element_ty), mask=(source >= 0) & is_column)
        saved = write_after(
            row + 1 - first, write_rows, write_slot, saved, row, saved_rows_ptr, saved_slots_ptr, num_saved, state_ptr,
            slot_stride, state, is_there,
        )  # fmt: skip
