"""Kept inputs of recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch


@Operation
def keep_rows(x: Tensor, mixed: Tensor, rates: Tensor, kept: Tensor, batch: StateBatch) -> None:
    """Copy row batch.keep_from[i] of x, mixed and rates, side by side, to row batch.keep_to[i] of `kept`.

    x, mixed, rates [num_tokens, any width, also 0], kept [num_kept, sum of the widths]: one float dtype, any stride of
    rows. Call it after the operations that read `kept`.
    """
    rows = batch.keep_from.long()
    kept[batch.keep_to.long()] = torch.cat([x[rows], mixed[rows], rates[rows]], dim=1)
