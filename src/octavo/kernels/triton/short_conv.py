"""Short convolutions on a GPU: one launch computes all rows, and the next one writes the states.

So rows of one sequence are computed in parallel. A row reads earlier rows, and the state before the first row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.elementwise import activated
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.rounding import round_to
from octavo.kernels.triton.states import first_not_below, load_inputs, write_state

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch

_BLOCK = 256


def short_conv(
    x: Tensor,
    kept_x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    batch: StateBatch,
    has_silu: bool,
    out: Tensor,
) -> None:
    """See `octavo.kernels.operations.short_conv`."""
    (width, channels), num_seqs, num_blocks = weight.shape, len(batch.read_slots), cdiv(weight.shape[1], _BLOCK)
    rows = x, kept_x, state, batch.query_start, batch.sources, batch.read_slots
    sizes = x.stride(0), kept_x.stride(0), state.stride(0), channels
    has_bias = bool(bias.numel())
    _convolve[len(batch.sources), num_blocks](
        *rows, weight, bias if has_bias else weight, out, num_seqs, *sizes, out.stride(0), WIDTH=width,
        HAS_BIAS=has_bias, HAS_SILU=has_silu, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    _shift_states[num_seqs, num_blocks](
        *rows, batch.write_slots, batch.write_rows, batch.saved_rows, batch.saved_slots, len(batch.saved_rows), *sizes,
        WIDTH=width, TAPS=power_of_2_from(width - 1), BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@kernel(do_not_specialize=["num_seqs"])
def _convolve(
    x_ptr, kept_ptr, state_ptr, query_start_ptr, sources_ptr, read_slots_ptr, weight_ptr, bias_ptr, out_ptr, num_seqs,
    x_stride, kept_stride, slot_stride, channels, out_stride, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    sequence = first_not_below(query_start_ptr, num_seqs + 1, row + 1) - 1  # the last one that begins at or before row
    own_source = tl.load(sources_ptr + row).to(tl.int64)
    if (own_source < 0) | (sequence >= num_seqs):
        return
    first = tl.load(query_start_ptr + sequence)
    read_slot = tl.load(read_slots_ptr + sequence)
    of_slot = state_ptr + read_slot.to(tl.int64) * slot_stride + channel
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = row - (WIDTH - 1 - tap)
        is_row = at >= first
        source = tl.load(sources_ptr + at, mask=is_row, other=0).to(tl.int64)
        x = load_inputs(x_ptr, x_stride, kept_ptr, kept_stride, source, channel, is_channel & is_row)
        of_state = of_slot + (at - first + WIDTH - 1) * channels
        before = tl.load(of_state, mask=is_channel & (at < first) & (read_slot >= 0), other=0.0)
        x = tl.where(is_row, x, before).to(tl.float32)
        total += x * tl.load(weight_ptr + tap * channels + channel, mask=is_channel, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0)
    if HAS_SILU:
        total = activated(total, 1.0, "silu")
    place = out_ptr + own_source * out_stride + channel
    tl.store(place, round_to(total, out_ptr.dtype.element_ty), mask=is_channel)


@triton.jit
def _inputs_before(
    count, first, before, x_ptr, kept_ptr, sources_ptr, x_stride, kept_stride, tap, channel, is_there,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the last WIDTH - 1 inputs of a sequence after `count` of its rows. before: those before its first row."""
    at = count - (WIDTH - 1) + tap
    is_row = is_there & (at >= 0)
    source = tl.load(sources_ptr + first + at, mask=(at >= 0) & (tap < WIDTH - 1), other=0).to(tl.int64)
    of_rows = load_inputs(x_ptr, x_stride, kept_ptr, kept_stride, source, channel, is_row)
    of_state = tl.gather(before, tl.minimum(count + tap, WIDTH - 2) + 0 * channel, 0)
    return tl.where(is_row, of_rows, of_state)


@kernel(do_not_specialize=["num_saved"])
def _shift_states(
    x_ptr, kept_ptr, state_ptr, query_start_ptr, sources_ptr, read_slots_ptr, write_slots_ptr, write_rows_ptr,
    saved_rows_ptr, saved_slots_ptr, num_saved, x_stride, kept_stride, slot_stride, channels, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    tap, channel = tl.arange(0, TAPS)[:, None], (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_there = (tap < WIDTH - 1) & (channel < channels)
    first, end = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    read_slot = tl.load(read_slots_ptr + sequence)
    state_ptr += tap * channels + channel
    is_stored = is_there & (read_slot >= 0)
    before = tl.load(state_ptr + read_slot.to(tl.int64) * slot_stride, mask=is_stored, other=0.0)
    count, slot = tl.load(write_rows_ptr + sequence), tl.load(write_slots_ptr + sequence)
    saved, last = first_not_below(saved_rows_ptr, num_saved, first), first_not_below(saved_rows_ptr, num_saved, end)
    while saved <= last:  # the written state, then saved ones
        values = _inputs_before(
            count, first, before, x_ptr, kept_ptr, sources_ptr, x_stride, kept_stride, tap, channel, is_there, WIDTH
        )
        write_state(state_ptr, slot, slot_stride, values, is_there)
        count = tl.load(saved_rows_ptr + saved, mask=saved < last, other=first) + 1 - first
        slot = tl.load(saved_slots_ptr + saved, mask=saved < last, other=-1)
        saved += 1
