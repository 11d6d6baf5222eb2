"""Sums in a fixed order. In `tl.sum` over many lanes, the order depends on a row's address."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_in_halves(tile, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum [ROWS, 2 ** LEVELS] to [ROWS], by adding halves."""
    for level in tl.static_range(LEVELS):
        tile = tl.sum(tl.reshape(tile, [ROWS, 2, 1 << (LEVELS - 1 - level)]), axis=1)  # a + b has one order
    return tl.reshape(tile, [ROWS])
