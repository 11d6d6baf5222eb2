"""Cache rows and queries of multi-head latent attention on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.quantization import ROUNDED_KV_DTYPES, kv_scales
from octavo.kernels.triton.e4m3 import as_bytes
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.norms import inverse_rms
from octavo.kernels.triton.rope_kv import magnitude_of, rotated, rounded, scale_and_inverse
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 16


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
    """See `octavo.kernels.operations.rope_and_write_latents`. The norm has the bits of `rms_norm`."""
    (num_tokens, num_heads, rotary_dim), rank = q.shape, len(weight)
    lanes = power_of_2_from(rank)
    has_scales = cache.dtype in ROUNDED_KV_DTYPES
    scales = kv_scales(cache) if has_scales else cos_sin
    _rope_and_write_latents[num_tokens, cdiv(num_heads, _HEADS) + 1](
        q, latent, weight, cos_sin, positions, slot_mapping, as_bytes(cache), scales, queries, eps,
        *q.stride()[:2], latent.stride(0), cos_sin.stride(0), cache.stride(0), cache.stride(2),
        scales.stride(0) if has_scales else 0, *queries.stride()[:2],
        NUM_HEADS=num_heads, HEADS=_HEADS, RANK=rank, ROTARY_DIM=rotary_dim, BLOCK_SIZE=cache.shape[2],
        HALF=power_of_2_from(max(1, rotary_dim // 2)), LANES=lanes, LEVELS=lanes.bit_length() - 1,
        IS_INTERLEAVED=interleaved, HAS_SCALES=has_scales, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _rotate_queries(
    place, out, is_head, turns, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    x, y, is_there, first, second = rotated(place, is_head, turns, ROTARY_DIM, HALF, IS_INTERLEAVED)
    tl.store(out + first, x, mask=is_there)
    tl.store(out + second, y, mask=is_there)


@kernel
def _rope_and_write_latents(
    q_ptr, latent_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr, scales_ptr, queries_ptr, eps,
    q_stride, q_head_stride, latent_stride, cos_sin_stride, block_stride, row_stride, scales_stride,
    queries_stride, queries_head_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turns = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    if part * HEADS < NUM_HEADS:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        _rotate_queries(
            q_ptr + token * q_stride + head * q_head_stride,
            queries_ptr + token * queries_stride + head * queries_head_stride + RANK,
            head < NUM_HEADS, turns, ROTARY_DIM, HALF, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token + tl.arange(0, 1)[:, None])
        is_row = slot >= 0
        place = latent_ptr + token * latent_stride
        dim = tl.arange(0, LANES)[None, :]
        is_dim = dim < RANK
        content = tl.load(place + dim, mask=is_dim, other=0.0).to(tl.float32)
        content *= inverse_rms(content * content, eps, RANK, 1, LEVELS)
        content *= tl.load(weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
        content = round_to(content, place.dtype.element_ty)
        is_finite = magnitude_of(content) < float("inf")
        x, y, is_there, first, second = rotated(place + RANK, is_row, turns, ROTARY_DIM, HALF, IS_INTERLEAVED)
        nan = tl.full([1, 1], float("nan"), tl.float32).to(x.dtype)
        x, y, content = tl.where(is_finite, x, nan), tl.where(is_finite, y, nan), tl.where(is_finite, content, 0.0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        row = cache_ptr + block * block_stride + offset * row_stride
        if HAS_SCALES:
            stored = cache_ptr.dtype.element_ty
            magnitude = tl.maximum(tl.maximum(magnitude_of(x), magnitude_of(y)), magnitude_of(content))
            scale, inverse = scale_and_inverse(magnitude, stored)
            x, y, content = rounded(x, inverse, stored), rounded(y, inverse, stored), rounded(content, inverse, stored)
            tl.store(scales_ptr + block * scales_stride + offset, scale, mask=is_row)
        tl.store(row + dim, content, mask=is_row & is_dim)
        tl.store(row + RANK + first, x, mask=is_there)
        tl.store(row + RANK + second, y, mask=is_there)
