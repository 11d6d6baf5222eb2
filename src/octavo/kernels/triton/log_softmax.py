"""Log probabilities on a GPU. The order of sums depends only on the vocabulary, not on a row's address as in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.launch import kernel, power_of_2_from
from octavo.kernels.triton.noise import logarithm
from octavo.kernels.triton.reductions import sum_in_halves

if TYPE_CHECKING:
    from torch import Tensor

_MOST_LANES = 4096


def log_softmax(logits: Tensor) -> None:
    """See `octavo.kernels.operations.log_softmax`."""
    num_rows, vocab = logits.shape
    lanes = min(power_of_2_from(vocab), _MOST_LANES)
    _log_softmax[(num_rows,)](
        logits, VOCAB=vocab, LANES=lanes, LEVELS=lanes.bit_length() - 1, num_warps=8, enable_fp_fusion=False
    )


@kernel
def _log_softmax(logits_ptr, VOCAB: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr):
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * VOCAB
    lane = tl.arange(0, LANES)[None, :]
    largest = tl.full([1, LANES], float("-inf"), tl.float32)
    for first in range(0, VOCAB, LANES):
        is_there = first + lane < VOCAB
        largest = tl.maximum(largest, tl.load(row_ptr + first + lane, mask=is_there, other=float("-inf")))
    largest = tl.max(largest, axis=1)[:, None]
    weights = tl.zeros([1, LANES], tl.float32)
    for first in range(0, VOCAB, LANES):
        is_there = first + lane < VOCAB
        distance = tl.load(row_ptr + first + lane, mask=is_there, other=0.0) - largest
        weight = tl.where(distance == distance, exponential(distance), distance)  # noqa: PLR0124  NaN stays
        weights += tl.where(is_there, weight, 0.0)
    total = sum_in_halves(weights, 1, LEVELS)[:, None]
    log_total = tl.where(total == total, logarithm(total), total)  # noqa: PLR0124
    for first in range(0, VOCAB, LANES):
        is_there = first + lane < VOCAB
        distance = tl.load(row_ptr + first + lane, mask=is_there, other=0.0) - largest
        tl.store(row_ptr + first + lane, distance - log_total, mask=is_there)
