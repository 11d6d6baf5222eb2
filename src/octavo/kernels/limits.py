"""What a processor gives at most, measured: against this every other figure is read."""

from __future__ import annotations

from dataclasses import dataclass


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
