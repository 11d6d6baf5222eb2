"""Hidden states of a whole prompt as one vector: an embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.runtime.faults import REQUEST_FAILED, log_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow


@dataclass(slots=True)
class _Sum:
    """Of the hidden states of the first `num_tokens` positions."""

    total: NDArray[np.float64]
    num_tokens: int = 0


class Pooler:
    """Takes the last hidden state of a prompt, or the mean of all of them, behind the final norm.

    A sum is kept from step to step, and through a preemption whose KV is kept: it is added up position by position, so
    that no cut of the prompt changes a bit. A prompt that is computed anew begins anew.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the sums of requests that ended."""
        for request_id in request_ids:
            self._sums.pop(request_id, None)

    def pool(
        self, inputs: ModelInputs, hidden: torch.Tensor, batch: InputBatch, errors: dict[str, str]
    ) -> dict[str, bytes]:
        """Take a step's hidden states [num_outputs, hidden]; return the vectors that are complete, float32 each.

        Notes in errors for whom that failed.
        """
        result: dict[str, bytes] = {}
        for index, request in enumerate(inputs.requests):
            if request.sampling_params.pooling is None:
                continue
            rows = hidden[int(inputs.output_start[index]) : int(inputs.output_start[index + 1])]
            try:
                vector = self._pool(request, rows, batch, is_complete=index in inputs.sampled)
            except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
                log_fault(request.request_id, "its hidden states were pooled", error)
                errors[request.request_id] = REQUEST_FAILED
                continue
            if vector is not None:
                result[request.request_id] = vector
        return result

    def _pool(self, request: RequestRow, rows: torch.Tensor, batch: InputBatch, *, is_complete: bool) -> bytes | None:
        if request.sampling_params.pooling == "last":
            return _rows(rows[-1:])[0].tobytes() if is_complete else None
        position = int(batch.num_computed_tokens[request.row])
        total = self._add(request.request_id, position, _rows(rows))
        return (total.total / total.num_tokens).astype(np.float32).tobytes() if is_complete else None

    def _add(self, request_id: str, position: int, rows: NDArray[np.float32]) -> _Sum:
        kept = self._sums.get(request_id)
        if kept is None or kept.num_tokens != position:
            if position:
                raise ValueError(f"{position} positions of {request_id} were not seen")
            kept = self._sums[request_id] = _Sum(np.zeros(rows.shape[1]))
        for row in rows:
            kept.total += row
        kept.num_tokens += len(rows)
        return kept


def _rows(hidden: torch.Tensor) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = hidden.float().cpu().numpy()
    return rows
