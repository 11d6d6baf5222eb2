"""Turn pooled hidden states into embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import ExecutionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo.outputs import RequestOutput


def embedding(
    output: RequestOutput, *, normalize: bool = True, num_dimensions: int | None = None
) -> NDArray[np.float32]:
    """Return the embedding as a float32 vector. Raises `ExecutionError` if the embedding is missing or not finite.

    normalize: True to scale to length 1. num_dimensions: Number of leading dimensions to keep, or None for all.
    """
    if output.error is not None or output.pooled is None:
        raise ExecutionError(output.error or "the request ended before its embedding was computed")
    vector = np.frombuffer(output.pooled, np.float32)[:num_dimensions].astype(np.float64)
    if normalize:
        vector /= max(float(np.sqrt(np.square(vector).sum())), 1e-12)
    if not np.isfinite(vector).all():
        raise ExecutionError("the embedding has values that are not finite")
    return vector.astype(np.float32)
