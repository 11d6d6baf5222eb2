"""Sums whose order is fixed by the code, not by the layout that the compiler chooses for a tile.

`tl.sum` over many lanes adds them in the order in which threads hold them. That order depends on alignment and strides,
too: a row could be summed in another order if it starts at another address. Adding halves to halves has one order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_in_halves(tile, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the sums [ROWS] of a tile [ROWS, 2 ** LEVELS]: the second half of a row is added to the first."""
    for level in tl.static_range(LEVELS):
        tile = tl.sum(tl.reshape(tile, [ROWS, 2, 1 << (LEVELS - 1 - level)]), axis=1)  # a + b has one order
    return tl.reshape(tile, [ROWS])
