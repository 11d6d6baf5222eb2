"""Rotation of activations and weights before both are rounded to int8.

A few input features of a language model are many times as large as the rest. With one scale per row they decide the
rounding step of all features. An orthogonal transform of the rows and of the weight does not change their product, but
spreads such a feature over its block: x @ W.T = H(x) @ (H(W) / block).T. H is the unnormalized Walsh-Hadamard transform
of consecutive blocks of a power of two; it is its own inverse except for the factor `block`. See QuaRot (arXiv
2404.00456).

H consists of additions and subtractions in a fixed order, so the compiled kernels (csrc/rotation.h) give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BLOCK = 256


def rotation_block(in_features: int) -> int:
    """Return how many consecutive features are rotated together: the largest power-of-two divisor, at most 256."""
    return min(in_features & -in_features, _MAX_BLOCK)


def rotate(rows: Tensor) -> Tensor:
    """Return rows [..., in_features] of any floating type rotated, unnormalized, in float32.

    For distances 1, 2, 4, ... within a block, the sum of two values replaces the first, the difference the second.
    """
    rotated, apart = rows.float().contiguous(), 1
    while apart < rotation_block(rows.shape[-1]):
        pairs = rotated.view(*rows.shape[:-1], rows.shape[-1] // (2 * apart), 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated = torch.stack((first + second, first - second), dim=-2).view(rows.shape)
        apart *= 2
    return rotated
