"""The state space model of Mamba-2."""

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
def mamba2(
    xbc: Tensor,
    dt: Tensor,
    kept_xbc: Tensor,
    kept_dt: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    batch: StateBatch,
    num_groups: int,
    out: Tensor,
) -> None:
    """Write the results of Mamba-2's state space model into `out`, and advance `state`.

    Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060). Of each head's state S [state_size, head_dim], in float32:
    dt = clamp(softplus(dt + dt_bias), dt_min, dt_max); S = S * exp(decay * dt) + B (dt * x)^T; out = S^T C + skip * x.

    xbc [num_tokens, num_heads * head_dim + 2 * num_groups * state_size]: x, B, C after the convolution. Head h uses B
    and C of group h // (num_heads / num_groups).
    dt [num_tokens, num_heads], of any float dtype. dt_bias, decay (negative), skip float32 [num_heads].
    state float32 [num_slots, num_heads, head_dim / 16, state_size, 16]: see `matrix_states`; any slot stride.
    out [num_tokens, num_heads * head_dim] of xbc's dtype.
    kept_xbc, kept_dt: the same of kept rows [num_kept, ...]. Rows may have any stride.
    """
    xbc, dt = gather_rows(batch, xbc, kept_xbc), gather_rows(batch, dt, kept_dt)
    num_heads, depth = state.shape[1], state.shape[3]
    width = num_groups * depth
    x, keys, queries = xbc.float().split_with_sizes([xbc.shape[1] - 2 * width, width, width], dim=1)
    x = x.view(-1, *state.shape[1:3], 1, state.shape[4])
    keys, queries = (
        each.view(-1, num_groups, depth).repeat_interleave(num_heads // num_groups, dim=1)[:, :, None, :, None]
        for each in (keys, queries)
    )
    size = F.softplus(dt.float() + dt_bias).clamp(dt_min, dt_max)[:, :, None, None, None]
    decays = (size * decay[:, None, None, None]).exp()
    results = torch.empty(len(xbc), out.shape[1], device=out.device)
    for steps in StateSteps.of(batch):
        values = steps.read(state)  # [num_heads, head_dim / 16, state_size, 16]
        steps.write(state, 0, values)
        for num_rows, row in enumerate(range(steps.rows.start, steps.rows.stop), 1):
            values = values * decays[row] + keys[row] * (size[row] * x[row])
            sums = (values * queries[row]).sum(dim=2) + skip[:, None, None] * x[row, :, :, 0]
            results[row] = sums.flatten()
            steps.write(state, num_rows, values)
    scatter_rows(batch, results, out)
