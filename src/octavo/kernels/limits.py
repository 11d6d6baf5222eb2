"""Limits of processors."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates per second of one instruction set.

    byte_ops: int8 operations. bfloat16_flops: like `flops` without bfloat16 instructions.
    """

    flops: float
    byte_ops: float
    bfloat16_flops: float
    bytes_read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher rates."""
        return Limits(*map(max, astuple(self), astuple(other)))

    def is_far_from(self, other: Limits) -> bool:
        """Return True if any rate differs by more than a quarter."""
        return any(max(a, b) > 1.25 * min(a, b) for a, b in zip(astuple(self), astuple(other), strict=True))
