"""Indices of ragged arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def starts(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the first index of each run of `counts` elements, then the number of elements."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=result[1:])
    return result


def ranges(first: NDArray[np.integer], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `counts` consecutive numbers from `first` on, for each pair of elements."""
    offsets: NDArray[np.int64] = np.repeat(first - counts.cumsum() + counts, counts)
    return offsets + np.arange(len(offsets))
