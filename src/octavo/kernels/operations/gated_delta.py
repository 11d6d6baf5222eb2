"""The gated delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.operation import Operation
from octavo.kernels.state_steps import StateSteps, gather_rows, scatter_rows

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch

_LEAST_SQUARES = 1e-6


@Operation
def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    kept_qkv: Tensor,
    kept_a: Tensor,
    kept_b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    batch: StateBatch,
    num_key_heads: int,
    is_tiled: bool,
    out: Tensor,
) -> None:
    """Write the gated delta rule's results into `out`, and advance `state`.

    Yang et al., "Gated Delta Networks" (arXiv 2412.06464). Of each head's state S [key_dim, value_dim], in float32:
    S *= exp(decay * softplus(a + dt_bias)); S += k (sigmoid(b) * (v - S^T k))^T; out = S^T q.

    qkv [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim]: queries, keys, values after the convolution.
    q is divided by |q| * sqrt(key_dim), k by |k|.
    a, b [num_tokens, num_heads], of any float dtype. decay (negative), dt_bias float32 [num_heads].
    state float32 [num_slots, num_heads, value_dim / 16, key_dim, 16]: see `matrix_states`; any slot stride.
    out [num_tokens, num_heads * value_dim] of qkv's dtype.
    kept_qkv, kept_a, kept_b: the same of kept rows [num_kept, ...]. Rows may have any stride.
    is_tiled: value head h uses key head h % num_key_heads (GGUF), not h // (num_heads / num_key_heads).
    """
    qkv, a, b = (gather_rows(batch, each, kept) for each, kept in ((qkv, kept_qkv), (a, kept_a), (b, kept_b)))
    num_heads, depth = state.shape[1], state.shape[3]
    width = num_key_heads * depth
    query, key, value = qkv.float().split_with_sizes([width, width, qkv.shape[1] - 2 * width], dim=1)
    heads = torch.arange(num_heads, device=qkv.device)
    of_head = heads % num_key_heads if is_tiled else heads // (num_heads // num_key_heads)
    query, key = (_normalized(each.view(-1, num_key_heads, depth))[:, of_head] for each in (query, key))
    query = query * depth**-0.5
    value = value.view(-1, *state.shape[1:3], 1, state.shape[4])
    decays = (decay * F.softplus(a.float() + dt_bias)).exp()[:, :, None, None, None]
    beta = b.float().sigmoid()[:, :, None, None, None]
    query, key = query[:, :, None, :, None], key[:, :, None, :, None]
    results = torch.empty(len(qkv), out.shape[1], device=out.device)
    for steps in StateSteps.of(batch):
        values = steps.read(state)  # [num_heads, value_dim / 16, key_dim, 16]
        steps.write(state, 0, values)
        for num_rows, row in enumerate(range(steps.rows.start, steps.rows.stop), 1):
            values *= decays[row]
            change = (value[row] - (values * key[row]).sum(dim=2, keepdim=True)) * beta[row]
            values += key[row] * change
            results[row] = (values * query[row]).sum(dim=2).flatten()
            steps.write(state, num_rows, values)
    scatter_rows(batch, results, out)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LEAST_SQUARES)
