"""Locally typical sampling (Meister et al. 2023, section 3). It follows the other filters, as in Hugging Face's TGI."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import Kernels
    from octavo.sampling_params import SamplingParams

_FIRST_LOOK = 1024  # tokens; sorting a whole vocabulary is slow


def keep_typical(row: Tensor, params: SamplingParams, kernels: Kernels) -> None:
    """Set logits to -inf if min_p, top_k, top_p or typical sampling excludes them. Mutates `row`, float32 [vocab].

    A token's surprise is -ln p. The tokens with the surprise nearest to the expected surprise are kept until their
    total probability reaches typical_p. Tokens that tie with the last one are kept, too. Greedy rows, rows with NaN and
    rows of -inf do not change.
    """
    if params.is_greedy:
        return
    scaled = row / params.temperature
    if not bool(scaled.max() > -math.inf):  # false for NaN
        return
    ids, weights = _left(scaled, params, kernels)
    probabilities = weights / weights.sum()
    surprise = -probabilities.log()
    expected = (probabilities * surprise).nan_to_num(0.0).sum()
    distance = (surprise - expected).abs()
    kept = ids[distance <= _reach(distance, probabilities, params.typical_p)]
    values = row[kept]
    row.fill_(-math.inf)
    row[kept] = values


def _reach(distance: Tensor, probabilities: Tensor, mass: float) -> Tensor:
    for count in sorted({min(_FIRST_LOOK, len(distance)), len(distance)}):
        nearest, order = distance.topk(count, largest=False)
        reached = probabilities[order].cumsum(0) >= mass
        if bool(reached.any()):
            return nearest[reached.int().argmax()]
    return nearest[-1]  # rounding made the sum too small


def _left(scaled: Tensor, params: SamplingParams, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Apply min_p, then top_k, then top_p, as in `Kernels.sample`."""
    largest = scaled.max()
    weights = torch.where(scaled == largest, 1.0, (scaled.double() - largest.double()).exp())
    likely = weights >= params.min_p if params.min_p else scaled > -math.inf
    if not params.top_k and params.top_p == 1.0:
        ids = likely.nonzero().flatten()
        return ids, weights[ids]
    most = int(likely.sum())
    most = min(most, params.top_k) if params.top_k else most
    count = most if params.top_k else min(most, _FIRST_LOOK)
    ids = kernels.top_tokens(scaled[None], count)[1][0]
    if params.top_p == 1.0 and count == most:
        return ids, weights[ids]
    total = weights[ids].sum() if count == most else weights[likely].sum()
    before = weights[ids].cumsum(0) - weights[ids]
    is_left = before < params.top_p * total
    if count < most and bool(is_left.all()):
        ids = kernels.top_tokens(scaled[None], most)[1][0]
        is_left = weights[ids].cumsum(0) - weights[ids] < params.top_p * total
    ids = ids[is_left]
    return ids, weights[ids]
