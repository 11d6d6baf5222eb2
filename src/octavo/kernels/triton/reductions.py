"""Sums whose order is fixed by the code, not by the layout that a compiler gives a tile.

A `tl.sum` over many lanes adds in the order in which threads hold them, and that follows from alignment and strides as
well: the same row could be summed in another order where it starts at another address. Halves onto halves is one order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_in_halves(tile, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return the sums [ROWS] of a tile [ROWS, LANES], LANES a power of two: the second half is added to the first."""
    width: tl.constexpr = LANES
    while width > 1:
        width: tl.constexpr = width // 2
        tile = tl.sum(tl.reshape(tile, [ROWS, 2, width]), axis=1)  # a + b has one order
    return tl.reshape(tile, [ROWS])
