"""Rotation of activations and weights before both are rounded to int8 (docs/why.md).

x @ W.T = H(x) @ (H(W) / block).T, with the unnormalized Walsh-Hadamard transform H, which spreads huge input features
over their block. See QuaRot (arXiv 2404.00456).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BLOCK = 256


def rotation_block(in_features: int) -> int:
    """Return a rotation's number of adjacent features: the largest power-of-two divisor up to 256."""
    return min(in_features & -in_features, _MAX_BLOCK)


def rotate(rows: Tensor) -> Tensor:
    """Rotate rows in float32, unnormalized.

    For each distance 1, 2, 4, ..., pairs at this distance become their sum and difference (csrc/rotation.h).
    """
    rotated, apart = rows.float().contiguous(), 1
    while apart < rotation_block(rows.shape[-1]):
        pairs = rotated.view(*rows.shape[:-1], rows.shape[-1] // (2 * apart), 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated = torch.stack((first + second, first - second), dim=-2).view(rows.shape)
        apart *= 2
    return rotated
