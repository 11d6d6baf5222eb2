"""Bounds of loops that are only known as a kernel runs."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.rounding import INTERPRETED


@triton.jit
def loop_bound(number):
    """Return a number as `range` takes it: in the interpreter (3.6) it is an array of one, for numpy 2.4 no index."""
    if INTERPRETED:
        number = number + tl.zeros([1], tl.int32)  # another one, to be changed
        number.handle.data = number.handle.data.reshape(())
    return number
