"""What kernels with recurrent states share: the rows of a `StateBatch`, and the slots of states."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.noise import twice_atanh


@triton.jit
def load_inputs(x_ptr, stride, kept_ptr, kept_stride, source, column, is_there):
    """Return inputs of a state row, 0 if not `is_there`. source: int64, see `StateBatch.sources`.

    There are two loads, of which one is masked, because Triton 3.6 cannot select an address for AMD.
    """
    is_new, replayed = is_there & (source >= 0), is_there & (source < 0)
    new = tl.load(x_ptr + source * stride + column, mask=is_new, other=0.0)
    kept = tl.load(kept_ptr + (-1 - source) * kept_stride + column, mask=replayed, other=0.0)
    return tl.where(is_new, new, kept)


@triton.jit
def first_not_below(sorted_ptr, count, number):
    """Return the index of the first of `count` ascending numbers that is at least `number`, or `count`."""
    low, high = 0 * number, 0 * number + count
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(sorted_ptr + middle) < number
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_below, high, middle)
    return low


@triton.jit
def write_state(state_ptr, slot, stride, values, is_there):
    """Write a state to a slot, or nothing if the slot is -1. state_ptr: addresses in slot 0."""
    if slot >= 0:
        tl.store(state_ptr + slot.to(tl.int64) * stride, values, mask=is_there)


@triton.jit
def write_after(
    num_rows, write_rows, write_slot, saved, row, saved_rows_ptr, saved_slots_ptr, num_saved, state_ptr, stride, values,
    is_there,
):  # fmt: skip
    """Write the state after `row`, the sequence's row number `num_rows`, to its slots.

    saved: index of the next saved row. Returns the index after this row.
    """
    if num_rows == write_rows:
        write_state(state_ptr, write_slot, stride, values, is_there)
    while tl.load(saved_rows_ptr + saved, mask=saved < num_saved, other=-1) == row:
        write_state(state_ptr, tl.load(saved_slots_ptr + saved), stride, values, is_there)
        saved += 1
    return saved


@triton.jit
def softplus(x):
    """Return ln(1 + e^x) of float32, as max(x, 0) + ln(1 + y) with y = e^-|x| and ln(1 + y) = 2 atanh(y / (2 + y))."""
    y = exponential(-tl.abs(x))
    return tl.where(x < 0.0, 0.0, x) + twice_atanh(tl.div_rn(y, 2.0 + y))  # NaN stays
