"""Bounds of loops that are only known as a kernel runs."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.rounding import INTERPRETED


@triton.jit
def loop_bound(number):
    """Return a number as `range` takes it: the interpreter's (3.6) are arrays of one, of which numpy 2.4 makes no index."""
    if INTERPRETED:
        number = number + tl.zeros([1], tl.int32)  # another one, to be changed
        number.handle.data = number.handle.data.reshape(())
    return number
