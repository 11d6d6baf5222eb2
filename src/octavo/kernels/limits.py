"""Limits of processors."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates per second of one instruction set.

    bfloat16_flops: higher than `flops` only with a bfloat16 instruction. byte_ops: int8 products.
    """

    flops: float
    byte_ops: float
    bfloat16_flops: float
    bytes_read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher rates, because a lower rate was disturbed."""
        return Limits(*map(max, astuple(self), astuple(other)))

    def is_far_from(self, other: Limits) -> bool:
        """Return True if any rate differs by more than a quarter: the load of a shared machine changed."""
        return any(max(a, b) > 1.25 * min(a, b) for a, b in zip(astuple(self), astuple(other), strict=True))
