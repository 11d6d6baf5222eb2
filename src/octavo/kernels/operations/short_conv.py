"""Short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.operation import Operation
from octavo.kernels.state_steps import StateSteps, gather_rows, scatter_rows

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch


@Operation
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
    """Write the causal depthwise convolution of each sequence's rows into `out`, and advance `state`.

    x, out [num_tokens, channels], kept_x [num_kept, channels]: one float dtype, any stride of rows.
    weight float32 [width, channels]: taps, the oldest input's first; 2 <= width <= 8. bias float32 [channels] or empty.
    state [num_slots, width - 1, channels] of x's dtype: the last inputs, the oldest first; any slot stride.

    Taps are added in order in float32, then the bias. If `has_silu`, SiLU follows. The result is rounded once.
    """
    width = len(weight)
    rows = gather_rows(batch, x, kept_x)
    results = torch.empty(rows.shape, device=x.device)
    for steps in StateSteps.of(batch):
        inputs = torch.cat([steps.read(state), rows[steps.rows]])
        for num_rows, slot in steps.slots:
            state[slot] = inputs[num_rows : num_rows + width - 1]
        if len(inputs) >= width:
            windows = inputs.unfold(0, width, 1).float()  # [rows, channels, width]
            sums = (windows * weight.t()).sum(dim=2)
            sums = sums + bias if bias.numel() else sums
            results[steps.rows] = F.silu(sums) if has_silu else sums
    scatter_rows(batch, results, out)
