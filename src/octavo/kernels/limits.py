"""What a processor gives at most, measured: against this every other figure is read."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one instruction set on some threads, per second.

    flops: float32 multiplications and additions in registers. byte_ops: those of int8 products. bfloat16_flops: those
    of bfloat16, more than of float32 only where the processor has an instruction for them. bytes_read: by a reader of
    memory that does nothing else.
    """

    flops: float
    byte_ops: float
    bfloat16_flops: float
    bytes_read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher of both in everything: whatever kept a rate low is no limit."""
        return Limits(*map(max, astuple(self), astuple(other)))

    def is_far_from(self, other: Limits) -> bool:
        """Whether some rate of one is a quarter more than the other's: the machine is shared, and changed meanwhile."""
        return any(max(a, b) > 1.25 * min(a, b) for a, b in zip(astuple(self), astuple(other), strict=True))
