"""What a processor gives at most, measured: against this every other figure is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one instruction set on some threads, per second.

    flops: float32 multiplications and additions in registers. byte_ops: those of int8 products. bytes_read: by a reader
    of memory that does nothing else.
    """

    flops: float
    byte_ops: float
    bytes_read: float
