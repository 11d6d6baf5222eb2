"""The gated delta rule on a GPU. A program advances 16 columns of a head's state, which stay in registers.

The rows of a sequence are computed in order. Sums over key_dim add halves, so their order depends only on key_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.state_batch import STATE_COLUMNS
from octavo.kernels.triton.exponentials import exponential, sigmoid
from octavo.kernels.triton.launch import kernel, power_of_2_from
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.reductions import sum_in_halves
from octavo.kernels.triton.rounding import round_to
from octavo.kernels.triton.states import first_not_below, load_inputs, softplus, write_after, write_state

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch

_LEAST_SQUARES = tl.constexpr(1e-6)
LANES_PER_WARP = 64  # of a state's rows


def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    kept_qkv: Tensor,
    kept_a: Tensor,
    kept_b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    batch: StateBatch,
    num_key_heads: int,
    is_tiled: bool,
    out: Tensor,
) -> None:
    """See `octavo.kernels.operations.gated_delta`."""
    num_heads, num_blocks, depth = state.shape[1:4]
    lanes = power_of_2_from(depth)
    _gated_delta[len(batch.read_slots), num_heads, num_blocks](
        qkv, a, b, kept_qkv, kept_a, kept_b, decay, dt_bias, state, out,
        batch.query_start, batch.sources, batch.read_slots, batch.write_slots, batch.write_rows, batch.saved_rows,
        batch.saved_slots, len(batch.saved_rows),
        qkv.stride(0), a.stride(0), b.stride(0), kept_qkv.stride(0), kept_a.stride(0), kept_b.stride(0),
        state.stride(0), out.stride(0), depth**-0.5,
        KEY_HEADS=num_key_heads, IS_TILED=is_tiled, DEPTH=depth, LANES=lanes, LEVELS=lanes.bit_length() - 1,
        COLUMNS=STATE_COLUMNS, num_warps=max(1, lanes // LANES_PER_WARP), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _normalized(x, scale, LEVELS: tl.constexpr):
    x = x.to(tl.float32)
    return x * tl.div_rn(scale, tl.sqrt_rn(sum_in_halves(x * x, 1, LEVELS) + _LEAST_SQUARES))[:, None]


@kernel(do_not_specialize=["num_saved"])
def _gated_delta(
    qkv_ptr, a_ptr, b_ptr, kept_qkv_ptr, kept_a_ptr, kept_b_ptr, decay_ptr, dt_bias_ptr, state_ptr, out_ptr,
    query_start_ptr, sources_ptr, read_slots_ptr, write_slots_ptr, write_rows_ptr, saved_rows_ptr, saved_slots_ptr,
    num_saved, qkv_stride, a_stride, b_stride, kept_qkv_stride, kept_a_stride, kept_b_stride, slot_stride, out_stride,
    scale, KEY_HEADS: tl.constexpr, IS_TILED: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_blocks = tl.num_programs(1), tl.num_programs(2)
    key_head = head % KEY_HEADS if IS_TILED else head // (num_heads // KEY_HEADS)
    lane, column = tl.arange(0, LANES)[None, :], tl.arange(0, COLUMNS)[:, None]
    is_there, is_column = lane < DEPTH, column < COLUMNS
    state_ptr += ((head * num_blocks + block) * DEPTH + lane) * COLUMNS + column
    value_column = (head * num_blocks + block) * COLUMNS + column
    first, end = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    read_slot, write_slot = tl.load(read_slots_ptr + sequence), tl.load(write_slots_ptr + sequence)
    write_rows = tl.load(write_rows_ptr + sequence)
    is_stored = is_there & (read_slot >= 0)
    state = tl.load(state_ptr + read_slot.to(tl.int64) * slot_stride, mask=is_stored, other=0.0)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    saved = first_not_below(saved_rows_ptr, num_saved, first)
    if write_rows == 0:
        write_state(state_ptr, write_slot, slot_stride, state, is_there)
    for row in range(loop_bound(first), loop_bound(end)):
        source = tl.load(sources_ptr + row).to(tl.int64)
        qkv = qkv_ptr, qkv_stride, kept_qkv_ptr, kept_qkv_stride, source
        query = _normalized(load_inputs(*qkv, key_head * DEPTH + lane, is_there), scale, LEVELS)
        key = _normalized(load_inputs(*qkv, (KEY_HEADS + key_head) * DEPTH + lane, is_there), 1.0, LEVELS)
        value = load_inputs(*qkv, 2 * KEY_HEADS * DEPTH + value_column, is_column).to(tl.float32)
        a = load_inputs(a_ptr, a_stride, kept_a_ptr, kept_a_stride, source, head, head < num_heads).to(tl.float32)
        b = load_inputs(b_ptr, b_stride, kept_b_ptr, kept_b_stride, source, head, head < num_heads).to(tl.float32)
        state = state * exponential(decay * softplus(a + dt_bias))
        change = (value - sum_in_halves(state * key, COLUMNS, LEVELS)[:, None]) * sigmoid(b)
        state = state + key * change
        result = sum_in_halves(state * query, COLUMNS, LEVELS)[:, None]
        place = out_ptr + source * out_stride + value_column
        tl.store(place, round_to(result, out_ptr.dtype.element_ty), mask=(source >= 0) & is_column)
        saved = write_after(
            row + 1 - first, write_rows, write_slot, saved, row, saved_rows_ptr, saved_slots_ptr, num_saved, state_ptr,
            slot_stride, state, is_there,
        )  # fmt: skip
