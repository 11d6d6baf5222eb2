"""Sums of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
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
    """Write the weighted sum of each row's experts into `out` [num_tokens, hidden], rounded once.

    outputs float32 [num_tokens * num_chosen, hidden]: row places[i, j] is the output of expert ids[i, j] for token i.
    shared float32 [num_tokens, hidden]: the shared expert's output, added last, or empty.
    shared_gate float32 [num_tokens, 1], or empty: its sigmoid multiplies `shared`.

    Outputs are added in float32, in a binary tree that halves the expert ids [0, num_experts), so a row's bits depend
    only on its own experts.
    """
    values = outputs[places.long()] * weights.unsqueeze(2)
    for row, chosen in enumerate(ids.tolist()):
        for into, source in additions(chosen, 0, num_experts):
            values[row, into] += values[row, source]
    total = values[:, 0]
    if shared.numel():
        total = total + (shared * shared_gate.sigmoid() if shared_gate.numel() else shared)
    out.copy_(total)


def additions(ids: list[int], low: int, high: int, first: int = 0) -> list[tuple[int, int]]:
    """Return the tree's additions for ascending expert ids in [low, high), as pairs (into, source).

    first: index of ids[0] and of the total.
    """
    if len(ids) < 2:
        return []
    middle = (low + high) // 2
    split = sum(each < middle for each in ids)
    listed = additions(ids[:split], low, middle, first) + additions(ids[split:], middle, high, first + split)
    return [*listed, (first, first + split)] if 0 < split < len(ids) else listed
