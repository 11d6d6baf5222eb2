"""Rows by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def sort_by_expert(ids: Tensor, sources: Tensor, places: Tensor, starts: Tensor) -> None:
    """Sort the choices `ids`, int32 [num_tokens, num_chosen], by expert, stably.

    sources int64 [num_tokens * num_chosen]: the token at each sorted index. places int32, shaped like ids: each
    choice's sorted index. starts int32 [num_experts + 1]: each expert's first sorted index, then the total.
    """
    order = ids.flatten().sort(stable=True).indices
    sources.copy_(order // ids.shape[1])
    places.view(-1)[order] = places.new_ones(len(order)).cumsum(0).to(places.dtype) - 1
    counts = ids.flatten().bincount(minlength=len(starts) - 1)
    starts[0] = 0
    starts[1:] = counts.cumsum(0)
