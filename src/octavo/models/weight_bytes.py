"""Computes the memory of weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octavo.config import DEFAULT_GROUP_SIZE
from octavo.models.architecture import DTYPE_BYTES, is_norm, is_vocabulary
from octavo.models.declared import Linear, Vector, in_order
from octavo.models.experts import is_router
from octavo.models.gated_delta import is_rate
from octavo.models.latent_attention import is_absorbed

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture


def weight_bytes(
    architecture: Architecture,
    dtype: str,
    norm_dtype: str | None = None,
    quantization: str | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
) -> int:
    """Return the bytes of all weights, scales and zero points, except tables.

    A checkpoint's FP8 counts as expanded to `dtype`. norm_dtype: of activations and of norms without an offset.
    quantization: for matrices not stored as integers.
    """
    norm_dtype = "float32" if architecture.norm_offset else norm_dtype or dtype
    in_blocks = _kept_blocks(architecture) if quantization is None else {}
    vectors = {each.name for each in in_order(architecture.tensors()) if isinstance(each, Vector)}
    total = _order_bytes(architecture) + sum(in_blocks.values())
    elsewhere = in_blocks.keys() | {name for each in architecture.tables for name in each.shapes}
    for name, shape in architecture.tensor_shapes().items():
        if name in elsewhere:
            continue
        bits, groups, zeros = _rounding(architecture, name, shape, quantization, group_size)
        if bits == 8:
            total += math.prod(shape) + 4 * shape[0]
        elif bits == 4:
            total += math.prod(shape) // 2 + 2 * shape[0] * groups * (2 if zeros else 1) + 4 * shape[0]
        else:
            kept = "float32" if name in vectors else norm_dtype if is_norm(name) else dtype
            total += math.prod(shape) * DTYPE_BYTES[kept]
    return total


def rounded_bits(matrix_name: str, quantization: str | None) -> int | None:
    """Return the bits to which a matrix is rounded, or None."""
    if quantization is None or is_never_rounded(matrix_name) or (quantization == "fp8" and is_vocabulary(matrix_name)):
        return None
    if quantization == "fp8":
        return 8
    is_int8 = quantization == "int8" or (quantization == "int4" and is_vocabulary(matrix_name))
    return 8 if is_int8 else 4


def is_never_rounded(matrix_name: str) -> bool:
    """Return True for routers, absorbed weights, and the rates of recurrent layers."""
    return is_router(matrix_name) or is_absorbed(matrix_name) or is_rate(matrix_name)


def _order_bytes(architecture: Architecture) -> int:
    stored = architecture.stored
    if stored is None or not stored.may_reorder:
        return 0
    linears = (each for each in in_order(architecture.tensors()) if type(each) is Linear)
    return sum(4 * each.in_features for each in linears if stored.covers(each.names[0]))


def _kept_blocks(architecture: Architecture) -> dict[str, int]:
    sizes = architecture.block_bytes
    linears = [each for each in in_order(architecture.tensors()) if isinstance(each, Linear)]
    products = [[f"{name}.weight" for name in linear.names] for linear in linears]
    return {name: sizes[name] for names in products if all(name in sizes for name in names) for name in names}


def _rounding(
    architecture: Architecture, name: str, shape: tuple[int, ...], quantization: str | None, group_size: int
) -> tuple[int | None, int, bool]:
    """Return (bits, scales per row, has zero points)."""
    if len(shape) != 2 or is_absorbed(name):
        return None, 0, False
    stored = architecture.stored
    if stored is not None and stored.covers(name.removesuffix(".weight")):
        return stored.bits, stored.num_groups(shape[1]), stored.has_zeros
    bits = rounded_bits(name, quantization)
    return bits, -(-shape[1] // group_size) if bits == 4 else 1, False
