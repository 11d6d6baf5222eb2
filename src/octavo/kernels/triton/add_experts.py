"""Sums of experts on a GPU.

Experts are added in ascending order. A stack holds sums that lack their right part, at most one per height.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 512


def add_experts(
    outputs: Tensor,
    ids: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor,
    shared_gate: Tensor,
    out: Tensor,
    num_experts: int,
) -> None:
    """See `octavo.kernels.operations.add_experts`."""
    (num_rows, size), num_chosen, height = out.shape, ids.shape[1], (num_experts - 1).bit_length()
    has_shared, has_gate = bool(shared.numel()), bool(shared_gate.numel())
    _add_experts[num_rows, cdiv(size, _BLOCK)](
        outputs, ids, places, weights, shared if has_shared else outputs, shared_gate if has_gate else weights, out,
        size, NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, HEIGHT=height, LANES=power_of_2_from(num_chosen),
        STACK=power_of_2_from(max(1, min(height, num_chosen - 1))), HAS_SHARED=has_shared, HAS_GATE=has_gate,
        BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _path(expert, NUM_EXPERTS: tl.constexpr, HEIGHT: tl.constexpr):
    """Return the turns from root to expert as bits, 1 to the right."""
    low, high, path = 0 * expert, 0 * expert + NUM_EXPERTS, 0 * expert
    for _ in range(HEIGHT):
        middle = (low + high) // 2
        is_right = (expert >= middle) & (high - low > 1)
        path = path * 2 + is_right.to(tl.int32)
        low, high = tl.where(is_right, middle, low), tl.where(is_right, high, tl.maximum(middle, low + 1))
    return path


@triton.jit
def _highest_bit(x):
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return x - (x >> 1)


@kernel
def _add_experts(
    outputs_ptr, ids_ptr, places_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, size,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, HEIGHT: tl.constexpr, LANES: tl.constexpr,
    STACK: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < size
    lane, slot = tl.arange(0, LANES), tl.arange(0, STACK)[:, None]
    choice = row * NUM_CHOSEN + lane
    path = _path(tl.load(ids_ptr + choice, mask=lane < NUM_CHOSEN, other=0), NUM_EXPERTS, HEIGHT)
    next_path = _path(tl.load(ids_ptr + choice + 1, mask=lane + 1 < NUM_CHOSEN, other=0), NUM_EXPERTS, HEIGHT)
    # highest bit in which neighbours' paths differ
    heights = tl.where(lane + 1 < NUM_CHOSEN, _highest_bit(path ^ next_path), 1 << HEIGHT)
    stack = tl.zeros([STACK, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    waiting, num_waiting = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)  # bits of heights, and their number
    for index in range(NUM_CHOSEN):
        place = tl.load(places_ptr + row * NUM_CHOSEN + index).to(tl.int64)
        total = tl.load(outputs_ptr + place * size + column, mask=is_there, other=0.0)
        total *= tl.load(weights_ptr + row * NUM_CHOSEN + index)
        height = tl.sum(tl.where(lane == index, heights, 0))
        while (waiting & (height - 1)) != 0:
            num_waiting -= 1
            waiting = waiting & (waiting - 1)  # the lowest height is the last one
            total = tl.sum(tl.where(slot == num_waiting, stack, 0.0), axis=0) + total
        stack = tl.where(slot == num_waiting, total[None, :], stack)
        num_waiting += 1
        waiting = waiting | height
    if HAS_SHARED:
        last = tl.load(shared_ptr + row * size + column, mask=is_there, other=0.0)
        if HAS_GATE:
            last *= tl.div_rn(1.0, 1.0 + exponential(-tl.load(gate_ptr + row)))
        total += last
    tl.store(out_ptr + row * size + column, round_to(total, out_ptr.dtype.element_ty), mask=is_there)
