"""Cache rows and queries of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.operation import Operation
from octavo.kernels.reference import rms_norm, rotate, write_rows

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def rope_and_write_latents(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    queries: Tensor,
) -> None:
    """Write normalized latents and rotated keys to the cache, and rotated q to the end of `queries`.

    DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    q [num_tokens, num_heads, rotary_dim]: the part of queries to rotate.
    latent [num_tokens, rank + rotary_dim]: a latent before its norm, and all heads' key before rotation.
    weight [rank], eps: of the latent's norm. positions, slot_mapping: see `AttentionBatch`.
    cache [num_blocks, 1, block_size, rank + rotary_dim].
    queries [num_tokens, num_heads, rank + rotary_dim]: the first `rank` values do not change.

    cos_sin, interleaved, the rounding for int8 and fp8, and latents that are not finite (zeros, and NaN for the key):
    as in `Kernels.rope_and_write_kv`.
    """
    turns = cos_sin[positions].unsqueeze(1)
    rank, rotary_dim = len(weight), q.shape[2]
    queries[..., rank:] = rotate(q, turns, interleaved=interleaved)
    content, key = latent.split_with_sizes([rank, rotary_dim], dim=1)
    content = rms_norm(content, weight, eps)
    is_finite = content.isfinite().all(dim=1, keepdim=True)
    key = torch.where(is_finite, rotate(key.unsqueeze(1), turns, interleaved=interleaved)[:, 0], torch.nan)
    rows = torch.cat([torch.where(is_finite, content, 0.0), key], dim=1)
    write_rows(cache, slot_mapping, rows.unsqueeze(1))
