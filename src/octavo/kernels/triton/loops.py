"""Bounds of loops that are only known when a kernel runs."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.rounding import INTERPRETED


@triton.jit
def loop_bound(number):
    """Return a number that `range` accepts. In the interpreter (3.6) it is an array of one, which numpy 2.4 rejects."""
    if INTERPRETED:
        number = number + tl.zeros([1], tl.int32)  # a copy, which is changed below
        number.handle.data = number.handle.data.reshape(())
    return number
