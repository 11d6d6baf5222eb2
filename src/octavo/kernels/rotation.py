"""Rows of activations rotated before they are rounded to int8, and weights with them.

A few input features of a language model are many times as large as the others. With one scale per row they decide the
step to which all are rounded. An orthogonal transform of the rows and of the weight leaves their product as it is, and
spreads such a feature over its block: x @ W.T = H(x) @ (H(W) / block).T, where H is the unnormalized Walsh-Hadamard
transform of consecutive blocks of a power of two, its own inverse but for the factor `block`. See QuaRot (arXiv
2404.00456).

It is additions alone, in a fixed order, so the compiled kernels (csrc/rotation.h) give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BLOCK = 256


def rotation_block(in_features: int) -> int:
    """Return how many consecutive features are rotated together: the largest power of two that divides, up to 256."""
    return min(in_features & -in_features, _MAX_BLOCK)


def rotate(rows: Tensor) -> Tensor:
    """Return rows [..., in_features] of any floating type rotated, unnormalized, in float32.

    Of values 1, 2, 4, ... apart in a block the sum takes the place of the first and the difference that of the second.
    """
    rotated, apart = rows.float().contiguous(), 1
    while apart < rotation_block(rows.shape[-1]):
        pairs = rotated.view(*rows.shape[:-1], rows.shape[-1] // (2 * apart), 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated = torch.stack((first + second, first - second), dim=-2).view(rows.shape)
        apart *= 2
    return rotated
