"""Bounds of loops."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.rounding import INTERPRETED


@triton.jit
def loop_bound(number):
    """Return a number for `range`. The interpreter (3.6) has arrays of one element, which numpy 2.4 rejects."""
    if INTERPRETED:
        number = number + tl.zeros([1], tl.int32)
        number.handle.data = number.handle.data.reshape(())
    return number
