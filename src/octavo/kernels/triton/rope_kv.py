"""Norms of heads, rotary embedding (Su et al. 2021), and writes of KV.

Operations are not fused, so int8 and fp8 KV has plain torch's bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.quantization import E4M3_MAX, ROUNDED_KV_DTYPES, kv_scales
from octavo.kernels.triton.e4m3 import as_bytes, to_e4m3
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.norms import inverse_rms
from octavo.kernels.triton.rounding import round_to, round_to_whole

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

_HEADS = 16
_LEAST_MAGNITUDE = tl.constexpr(1e-30)
_E4M3_MAX = tl.constexpr(E4M3_MAX)


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool,
    query_scale: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `Kernels`. Changes q in place. The norms have the bits of `rms_norm`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos_sin.shape[1]
    has_scales = k_cache.dtype in ROUNDED_KV_DTYPES
    k_scales, v_scales = (kv_scales(k_cache), kv_scales(v_cache)) if has_scales else (cos_sin, cos_sin)
    num_query_blocks, lanes = cdiv(num_heads, _HEADS), power_of_2_from(head_dim)
    _rope_and_write_kv[num_tokens, num_query_blocks + cdiv(num_kv_heads, _HEADS)](
        q, k, v, cos_sin, cos_sin if query_scale is None else query_scale, cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm, batch.positions, batch.slot_mapping,
        as_bytes(k_cache), as_bytes(v_cache), k_scales, v_scales, eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos_sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        *(k_scales.stride()[:2] if has_scales else (0, 0)), *(v_scales.stride()[:2] if has_scales else (0, 0)),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, NUM_QUERY_BLOCKS=num_query_blocks, HEADS=_HEADS,
        HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, BLOCK_SIZE=batch.block_size,
        HALF=power_of_2_from(max(1, rotary_dim // 2)),
        REST=power_of_2_from(max(1, head_dim - rotary_dim)), BLOCK_D=lanes, LEVELS=lanes.bit_length() - 1,
        IS_INTERLEAVED=interleaved, HAS_QUERY_SCALE=query_scale is not None, HAS_SCALES=has_scales,
        HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return q


@triton.jit
def rotated(
    place, is_head, cos_sin_ptr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    inverse=None, weight_ptr=None, HAS_NORM: tl.constexpr = False,
):  # fmt: skip
    """Return rotated pairs, mask and dimensions. inverse, weight_ptr: of `_normed`."""
    half = tl.arange(0, HALF)[None, :]
    first = half * 2 if IS_INTERLEAVED else half
    second = half * 2 + 1 if IS_INTERLEAVED else half + ROTARY_DIM // 2
    is_half = half < ROTARY_DIM // 2
    cosine = tl.load(cos_sin_ptr + half, mask=is_half, other=0.0)
    sine = tl.load(cos_sin_ptr + ROTARY_DIM // 2 + half, mask=is_half, other=0.0)
    x = _normed(place, first, is_head, is_half, inverse, weight_ptr, HAS_NORM).to(tl.float32)
    y = _normed(place, second, is_head, is_half, inverse, weight_ptr, HAS_NORM).to(tl.float32)
    dtype = place.dtype.element_ty
    x, y = round_to(x * cosine - y * sine, dtype), round_to(y * cosine + x * sine, dtype)
    return x, y, is_head & is_half, first, second


@triton.jit
def _normed(place, dim, is_head, is_dim, inverse, weight_ptr, HAS_NORM: tl.constexpr):
    """Load values of heads, and normalize and round them if HAS_NORM."""
    x = tl.load(place + dim, mask=is_head & is_dim, other=0.0)
    if HAS_NORM:
        weight = tl.load(weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
        x = round_to(x.to(tl.float32) * inverse * weight, x.dtype)
    return x


@triton.jit
def _inverse_of(place, is_head, eps, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the factors of heads' norms, [HEADS, 1]."""
    dim = tl.arange(0, 1 << LEVELS)[None, :]
    x = tl.load(place + dim, mask=is_head & (dim < HEAD_DIM), other=0.0).to(tl.float32)
    return inverse_rms(x * x, eps, HEAD_DIM, HEADS, LEVELS)


@triton.jit
def scale_and_inverse(magnitude, stored: tl.constexpr):
    """Return rows' scales and factors before rounding."""
    is_finite = magnitude < float("inf")
    is_used = is_finite & (magnitude >= _LEAST_MAGNITUDE)
    most = tl.full(magnitude.shape, 127.0 if stored == tl.int8 else _E4M3_MAX, tl.float32)
    scale = tl.where(is_finite, tl.div_rn(magnitude, most), float("nan"))
    return scale, tl.where(is_used, tl.div_rn(most, tl.where(is_used, magnitude, 1.0)), 0.0)


@triton.jit
def magnitude_of(x):
    """Return the largest magnitude of rows, infinity for NaN."""
    x = x.to(tl.float32)
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)[:, None]  # noqa: PLR0124


@triton.jit
def rounded(x, inverse, stored: tl.constexpr):
    """Round rows to int8 or E4M3."""
    x = tl.where(inverse > 0.0, x.to(tl.float32), 0.0)  # NaN and infinity times 0 would be NaN
    return round_to_whole(x * inverse).to(tl.int8) if stored == tl.int8 else to_e4m3(x * inverse)


@triton.jit
def _rotate_queries(
    place, is_head, cos_sin_ptr, query_scale_ptr, weight_ptr, eps, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, LEVELS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_QUERY_SCALE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    inverse = _inverse_of(place, is_head, eps, HEAD_DIM, HEADS, LEVELS) if HAS_NORM else None
    x, y, is_there, first, second = rotated(
        place, is_head, cos_sin_ptr, ROTARY_DIM, HALF, IS_INTERLEAVED, inverse, weight_ptr, HAS_NORM
    )
    if HAS_QUERY_SCALE or HAS_NORM:
        dtype = place.dtype.element_ty
        rest = ROTARY_DIM + tl.arange(0, REST)[None, :]
        z = _normed(place, rest, is_head, rest < HEAD_DIM, inverse, weight_ptr, HAS_NORM)
        if HAS_QUERY_SCALE:
            factor = tl.load(query_scale_ptr)
            x, y = round_to(x.to(tl.float32) * factor, dtype), round_to(y.to(tl.float32) * factor, dtype)
            z = round_to(z.to(tl.float32) * factor, dtype)
        tl.store(place + rest, z, mask=is_head & (rest < HEAD_DIM))
    tl.store(place + first, x, mask=is_there)
    tl.store(place + second, y, mask=is_there)


@triton.jit
def _write_keys(
    place, slot, scale_place, is_head, is_finite, cos_sin_ptr, weight_ptr, eps, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, LEVELS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    inverse = _inverse_of(place, is_head, eps, HEAD_DIM, HEADS, LEVELS) if HAS_NORM else None
    x, y, is_there, first, second = rotated(
        place, is_head, cos_sin_ptr, ROTARY_DIM, HALF, IS_INTERLEAVED, inverse, weight_ptr, HAS_NORM
    )
    rest = ROTARY_DIM + tl.arange(0, REST)[None, :]
    is_rest = is_head & (rest < HEAD_DIM)
    z = _normed(place, rest, is_head, rest < HEAD_DIM, inverse, weight_ptr, HAS_NORM)
    nan = tl.full([1, 1], float("nan"), tl.float32).to(z.dtype)
    x, y, z = tl.where(is_finite, x, nan), tl.where(is_finite, y, nan), tl.where(is_finite, z, nan)
    if HAS_SCALES:
        stored = slot.dtype.element_ty
        magnitude = tl.maximum(tl.maximum(magnitude_of(x), magnitude_of(y)), magnitude_of(z))
        scale, inverse = scale_and_inverse(magnitude, stored)
        x, y, z = rounded(x, inverse, stored), rounded(y, inverse, stored), rounded(z, inverse, stored)
        tl.store(scale_place, scale, mask=is_head)
    tl.store(slot + first, x, mask=is_there)
    tl.store(slot + second, y, mask=is_there)
    tl.store(slot + rest, z, mask=is_rest)


@triton.jit
def _write_values(
    place, slot, scale_place, is_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Return which heads are finite."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_there = is_head & (dim < HEAD_DIM)
    x = tl.load(place + dim, mask=is_there, other=0.0)
    magnitude = magnitude_of(x)
    is_finite = magnitude < float("inf")
    x = tl.where(is_finite, x, 0.0)
    if HAS_SCALES:
        stored = slot.dtype.element_ty
        scale, inverse = scale_and_inverse(tl.where(is_finite, magnitude, 0.0), stored)
        x = rounded(x, inverse, stored)
        tl.store(scale_place, scale, mask=is_head)
    tl.store(slot + dim, x, mask=is_there)
    return is_finite


@kernel
def _rope_and_write_kv(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, query_scale_ptr, q_norm_ptr, k_norm_ptr, positions_ptr, slots_ptr,
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, eps,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, cos_sin_stride,
    k_block_stride, k_cache_head_stride, k_row_stride, v_block_stride, v_cache_head_stride, v_row_stride,
    k_scales_stride, k_scales_head_stride, v_scales_stride, v_scales_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, NUM_QUERY_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_QUERY_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    turns = cos_sin_ptr + position * cos_sin_stride
    if part < NUM_QUERY_BLOCKS:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        _rotate_queries(
            q_ptr + token * q_stride + head * q_head_stride, head < NUM_HEADS, turns, query_scale_ptr + position,
            q_norm_ptr, eps, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST, LEVELS, IS_INTERLEAVED, HAS_QUERY_SCALE,
            HAS_Q_NORM,
        )  # fmt: skip
    else:
        kv_head = ((part - NUM_QUERY_BLOCKS) * HEADS + tl.arange(0, HEADS))[:, None]
        slot = tl.load(slots_ptr + token)
        is_head = (kv_head < NUM_KV_HEADS) & (slot >= 0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        is_finite = _write_values(
            v_ptr + token * v_stride + kv_head * v_head_stride,
            v_cache_ptr + block * v_block_stride + kv_head * v_cache_head_stride + offset * v_row_stride,
            v_scales_ptr + block * v_scales_stride + kv_head * v_scales_head_stride + offset,
            is_head, HEAD_DIM, BLOCK_D, HAS_SCALES,
        )  # fmt: skip
        _write_keys(
            k_ptr + token * k_stride + kv_head * k_head_stride,
            k_cache_ptr + block * k_block_stride + kv_head * k_cache_head_stride + offset * k_row_stride,
            k_scales_ptr + block * k_scales_stride + kv_head * k_scales_head_stride + offset,
            is_head, is_finite, turns, k_norm_ptr, eps, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST, LEVELS,
            IS_INTERLEAVED, HAS_SCALES, HAS_K_NORM,
        )  # fmt: skip
