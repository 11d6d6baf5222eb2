"""Bounds of loops."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.rounding import INTERPRETED


@triton.jit
def loop_bound(number):
    """Convert a number for `range`: numpy 2.4 rejects the interpreter's (3.6) arrays of one element."""
    if INTERPRETED:
        number = number + tl.zeros([1], tl.int32)
        number.handle.data = number.handle.data.reshape(())
    return number
