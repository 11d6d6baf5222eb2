"""Limits of processors."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates per second of one instruction set.

    bfloat16_flops: above `flops` only with an instruction for them. byte_ops: of int8 products.
    """

    flops: float
    byte_ops: float
    bfloat16_flops: float
    bytes_read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher rates: a lower one was disturbed."""
        return Limits(*map(max, astuple(self), astuple(other)))

    def is_far_from(self, other: Limits) -> bool:
        """Return whether any rate differs by over a quarter, because a shared machine's load changed."""
        return any(max(a, b) > 1.25 * min(a, b) for a, b in zip(astuple(self), astuple(other), strict=True))
