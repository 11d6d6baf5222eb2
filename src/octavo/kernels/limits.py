"""Measured upper limits of a processor, with which other measurements are compared."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one instruction set on a number of threads, per second.

    flops: float32 multiplications and additions in registers. byte_ops: those of int8 products. bfloat16_flops: those
    of bfloat16; above `flops` only if the processor has an instruction for them. bytes_read: of a loop that only reads
    memory.
    """

    flops: float
    byte_ops: float
    bfloat16_flops: float
    bytes_read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher of both for each rate: a lower one was disturbed, and is no limit."""
        return Limits(*map(max, astuple(self), astuple(other)))

    def is_far_from(self, other: Limits) -> bool:
        """Return True if any rate differs by more than a quarter: the machine is shared, and its load changed."""
        return any(max(a, b) > 1.25 * min(a, b) for a, b in zip(astuple(self), astuple(other), strict=True))
