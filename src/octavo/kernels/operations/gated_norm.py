"""Norms with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool, out: Tensor
) -> None:
    """Write the RMS norm of groups of `group_size` features, with a gate, into `out`.

    norm(x) * weight * silu(gate) (gated delta net), or norm(x * silu(gate)) * weight (Mamba-2) if `gate_first`. The
    sums are float32, and the result is rounded once.

    x, gate, out [num_tokens, size]: one float dtype, any token stride. weight [group_size], for all groups, or [size];
    of x's dtype or float32.
    """
    groups = (len(x), -1, group_size)
    wide, factors = x.float().reshape(groups), F.silu(gate.float()).view(groups)
    wide = wide * factors if gate_first else wide
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    weighted = normed * weight.float().view(-1, group_size)
    out.copy_((weighted if gate_first else weighted * factors).flatten(1))
