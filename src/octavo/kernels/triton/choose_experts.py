"""Choices of experts on a GPU, one program per row. A tile's rows are groups of experts.

NaN is the largest number, as in torch, so every row has valid choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.operations.choose_experts import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.launch import kernel, power_of_2_from
from octavo.kernels.triton.reductions import sum_in_halves
from octavo.kernels.triton.selection import order_key

if TYPE_CHECKING:
    from torch import Tensor

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = map(tl.constexpr, (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN))
_LARGEST_KEY, _NO_KEY = tl.constexpr(2147483647), tl.constexpr(-2147483647)
_NO_ORDER = tl.constexpr(-9223372036854775807)
_LANES_PER_WARP = 512


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    factors: Tensor,
    ids: Tensor,
    weights: Tensor,
    scoring: int,
    num_groups: int,
    num_chosen_groups: int,
    is_group_best: bool,
    least_sum: float,
    scale: float,
) -> None:
    """See `octavo.kernels.operations.choose_experts`."""
    num_rows, num_experts = logits.shape
    groups, size = power_of_2_from(num_groups), power_of_2_from(num_experts // num_groups)
    _choose_experts[(num_rows,)](
        logits, bias if bias.numel() else logits, factors if factors.numel() else logits, ids, weights,
        least_sum, scale,
        NUM_EXPERTS=num_experts, NUM_GROUPS=num_groups, NUM_CHOSEN=ids.shape[1], NUM_CHOSEN_GROUPS=num_chosen_groups,
        SCORING=scoring, IS_GROUP_BEST=is_group_best, HAS_BIAS=bool(bias.numel()), HAS_FACTORS=bool(factors.numel()),
        IS_DIVIDED=least_sum >= 0, GROUPS=groups, SIZE=size,
        LEVELS=(groups * size).bit_length() - 1, num_warps=max(1, groups * size // _LANES_PER_WARP),
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _sum(x, LEVELS: tl.constexpr):
    return tl.sum(sum_in_halves(tl.reshape(x, [1, 1 << LEVELS]), 1, LEVELS))


@triton.jit
def _exponentials(x, is_there):
    """Return exp(x - the largest x), or 0 if not `is_there`."""
    distance = x - tl.max(tl.where(is_there, x, float("-inf")))
    power = tl.where(distance == distance, exponential(distance), distance)  # noqa: PLR0124  NaN stays
    return tl.where(is_there, power, 0.0)


@triton.jit
def _order(value, index, is_there):
    """Return distinct int64 keys: larger for larger values, then for lower indices."""
    key = tl.where(value == value, order_key(value), _LARGEST_KEY)  # noqa: PLR0124
    return (tl.where(is_there, key, _NO_KEY).to(tl.int64) << 32) - index


@triton.jit
def _largest(order, count):
    is_chosen = tl.zeros(order.shape, tl.int1)
    for _ in range(count):
        is_chosen = is_chosen | (order == tl.max(tl.where(is_chosen, _NO_ORDER, order)))
    return is_chosen


@kernel
def _choose_experts(
    logits_ptr, bias_ptr, factors_ptr, ids_ptr, weights_ptr, least_sum, scale,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    SCORING: tl.constexpr, IS_GROUP_BEST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    IS_DIVIDED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, of_group = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    is_there = (group < NUM_GROUPS) & (of_group < NUM_EXPERTS // NUM_GROUPS)
    expert = group * (NUM_EXPERTS // NUM_GROUPS) + of_group
    scores = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=is_there, other=0.0)
    if SCORING == _SOFTMAX:
        powers = _exponentials(scores, is_there)
        scores = tl.div_rn(powers, _sum(powers, LEVELS))
    elif SCORING == _SIGMOID:
        power = exponential(-scores)
        scores = tl.where(scores == scores, tl.div_rn(1.0, 1.0 + power), scores)  # noqa: PLR0124
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=is_there, other=0.0)
    if NUM_GROUPS > 1:
        order = _order(choice, expert, is_there)
        is_best = order == tl.max(order, axis=1)[:, None]
        best = tl.sum(tl.where(is_best, choice, 0.0), axis=1)[:, None]
        if not IS_GROUP_BEST and NUM_EXPERTS > NUM_GROUPS:
            order = tl.where(is_best, _NO_ORDER, order)
            best += tl.sum(tl.where(order == tl.max(order, axis=1)[:, None], choice, 0.0), axis=1)[:, None]
        is_kept = _largest(_order(best, group, group < NUM_GROUPS), NUM_CHOSEN_GROUPS)
        choice = tl.where(is_kept, choice, float("-inf"))
    is_chosen = _largest(_order(choice, expert, is_there), NUM_CHOSEN)
    if SCORING == _SOFTMAX_OF_CHOSEN:
        powers = _exponentials(scores, is_chosen)
        weights = tl.div_rn(powers, _sum(powers, LEVELS))
    else:
        weights = tl.where(is_chosen, scores, 0.0)
        if IS_DIVIDED:
            weights = tl.div_rn(weights, _sum(weights, LEVELS) + least_sum)
    place = tl.cumsum(tl.reshape(is_chosen.to(tl.int32), [GROUPS * SIZE]), 0) - 1
    place = row * NUM_CHOSEN + tl.reshape(place, [GROUPS, SIZE])
    tl.store(ids_ptr + place, expert, mask=is_chosen)
    weights *= scale
    if HAS_FACTORS:
        weights *= tl.load(factors_ptr + expert, mask=is_chosen, other=0.0)
    tl.store(weights_ptr + place, weights, mask=is_chosen)
