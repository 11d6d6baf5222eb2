"""Short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.operation import Operation
from octavo.kernels.state_steps import StateSteps

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch


@Operation
def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, batch: StateBatch, has_silu: bool, out: Tensor
) -> None:
    """Write the causal depthwise convolution of each sequence's rows into `out`, and advance `state`.

    x, out [num_tokens, channels]: one float dtype, any token stride. weight float32 [width, channels]: taps, the oldest
    input's first; 2 <= width <= 8. bias float32 [channels], or empty.
    state [num_slots, width - 1, channels] of x's dtype: the last inputs, the oldest first; any slot stride.

    Taps are added in order in float32, then the bias. If `has_silu`, SiLU follows. The result is rounded once.
    """
    width = len(weight)
    for steps in StateSteps.of(batch):
        inputs = torch.cat([steps.read(state), x[steps.rows]])
        windows = inputs.unfold(0, width, 1).float()  # [rows, channels, width]
        sums = (windows * weight.t()).sum(dim=2)
        sums = sums + bias if bias.numel() else sums
        out[steps.rows] = (F.silu(sums) if has_silu else sums).to(out.dtype)
        for row, slot in steps.slots():
            state[slot] = inputs[row + 1 : row + width]
