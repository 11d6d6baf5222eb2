"""Cosines and sines that rotate queries and keys (Su et al. 2021)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from octavo.kernels.vector_math import one_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from octavo.models.rope_config import RopeConfig

_SLICE_POSITIONS = 1024  # fit a core's cache


def make_cos_sin(rope: RopeConfig | None, head_dim: int, num_positions: int) -> Tensor:
    """Return float32 [num_positions, rotary_dim]: cosines of rotary_dim / 2 angles, then sines.

    Angles are float32 products, as in transformers.
    """
    if rope is None:
        return torch.empty(num_positions, 0, dtype=torch.float32)
    table = torch.empty(num_positions, rope.rotary_dim(head_dim), dtype=torch.float32)
    for start, rows in _slices(rope, head_dim, num_positions):
        table[start : start + len(rows)] = rows
    return table


def find_wrong_row(table: Tensor, rope: RopeConfig | None, head_dim: int) -> int | None:
    """Compute a table again. Return the first row that differs, or None."""
    if rope is None:
        return None
    for start, rows in _slices(rope, head_dim, len(table)):
        differs = table[start : start + len(rows)].cpu().view(torch.int32) != rows.view(torch.int32)
        if differs.any():
            return start + int(differs.any(dim=1).nonzero()[0])
    return None


def first_rows(rope: RopeConfig | None, head_dim: int, num_positions: int, num_rows: int) -> Tensor:
    """Return the first `num_rows` rows of the table for `num_positions`."""
    return make_cos_sin(None if rope is None else rope.within(num_positions), head_dim, num_rows)


def _slices(rope: RopeConfig, head_dim: int, num_positions: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first position, rows). Each slice overwrites the rows."""
    rope, rotary_dim = rope.within(num_positions), rope.rotary_dim(head_dim)
    slices = torch.empty(min(num_positions, _SLICE_POSITIONS), rotary_dim, dtype=torch.float32)
    with one_thread():
        frequencies = inverse_frequencies(rope, rotary_dim)
        for start in range(0, num_positions, _SLICE_POSITIONS):
            rows = slices[: num_positions - start]
            cosines, sines = rows.chunk(2, dim=-1)
            angles = torch.arange(start, start + len(rows), dtype=torch.float32)[:, None] * frequencies
            cosines.copy_(angles.cos())
            sines.copy_(angles.sin())
            rows *= rope.attention_factor
            yield start, rows


def make_query_scale(rope: RopeConfig | None, num_positions: int, device: torch.device) -> Tensor | None:
    """Return query factors (Llama 4), float32 [num_positions], or None."""
    if rope is None or not rope.query_scale_beta:
        return None
    with one_thread():
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        passed = positions / rope.original_max_position_embeddings
        return 1.0 + rope.query_scale_beta * torch.log(1.0 + passed.floor())


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Return radians per position, float32 [rotary_dim / 2]."""
    wavelengths = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    match rope.kind:
        case "default":
            return 1.0 / wavelengths
        case "linear":
            return 1.0 / wavelengths / rope.factor
        case "proportional":
            frequencies = 1.0 / wavelengths / rope.factor
            frequencies[int(rope.partial_rotary_factor * rotary_dim // 2) :] = 0.0
            return frequencies
        case "llama3":
            return _llama3(rope, 1.0 / wavelengths)
        case "yarn":
            return _yarn(rope, wavelengths, rotary_dim)
        case "longrope":
            assert rope.short_factors == rope.long_factors, "the factors are chosen by `within`"
            return 1.0 / (torch.tensor(rope.short_factors, dtype=torch.float32) * wavelengths)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones, blend between (Llama 3.1 model card)."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn(rope: RopeConfig, wavelengths: Tensor, rotary_dim: int) -> Tensor:
    """Like `_llama3`, with other bounds (Peng et al. 2023, section 3.2)."""

    def pair_with(rotations: float) -> float:
        """Return the pair with this many rotations in the context."""
        original = rope.original_max_position_embeddings
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
