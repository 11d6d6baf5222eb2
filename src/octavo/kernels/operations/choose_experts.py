"""Choices of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2  # csrc/experts.h


@Operation
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
    """Write each row's chosen experts, ascending, into `ids`, and their weights into `weights`.

    logits float32 [num_tokens, num_experts]. ids int32 and weights float32 [num_tokens, num_chosen].
    bias float32 [num_experts], or empty: added to scores for the choice only.
    scoring: scores and weights are the softmax (SOFTMAX) or sigmoid (SIGMOID) of logits. With SOFTMAX_OF_CHOSEN, scores
    are logits, and weights are their softmax over chosen experts.
    least_sum: if >= 0, divides weights by their sum + least_sum, except with SOFTMAX_OF_CHOSEN.
    Weights are multiplied by scale, then by `factors`, float32 [num_experts], unless empty.

    If neighbouring experts form several groups, only the best `num_chosen_groups` are used. A group's score is its best
    expert's if `is_group_best`, otherwise the sum of its two best. Ties go to the lowest expert.
    """
    scores = logits
    if scoring == SOFTMAX:
        scores = logits.softmax(dim=1)
    elif scoring == SIGMOID:
        scores = logits.sigmoid()
    choice = scores + bias if bias.numel() else scores
    if num_groups > 1:
        of_groups = choice.view(len(choice), num_groups, -1)
        best = of_groups.topk(1 if is_group_best else min(2, of_groups.shape[2]), dim=2).values.sum(dim=2)
        order = best.sort(dim=1, descending=True, stable=True).indices[:, :num_chosen_groups]
        kept = best.new_zeros(best.shape).scatter_(1, order, 1.0)
        choice = of_groups.masked_fill(kept.unsqueeze(2) == 0, float("-inf")).flatten(1)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, : ids.shape[1]].sort(dim=1).values
    found = scores.gather(1, chosen)
    if scoring == SOFTMAX_OF_CHOSEN:
        found = found.softmax(dim=1)
    elif least_sum >= 0:
        found = found / (found.sum(dim=1, keepdim=True) + least_sum)
    ids.copy_(chosen)
    found = found * scale
    weights.copy_(found * factors[chosen] if factors.numel() else found)
