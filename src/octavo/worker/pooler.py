"""Pools hidden states into embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.outputs import ErrorCode
from octavo.runtime.faults import log_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo.worker.host_copies import HostCopies
    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow


@dataclass(slots=True)
class _Sum:
    total: NDArray[np.float64]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Hidden states from `position` on, being copied to the host.

    states: float32 [n, hidden]. is_complete: True at the prompt's end.
    """

    request: RequestRow
    states: torch.Tensor
    position: int
    is_complete: bool


class Pooler:
    """Takes a prompt's last hidden state, or the mean of all, after the final norm.

    Positions are added one by one, so bits do not depend on the division into steps. Sums survive preemptions that keep
    KV.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop ended requests' sums."""
        for request_id in request_ids:
            self._sums.pop(request_id, None)

    @staticmethod
    def take(
        inputs: ModelInputs, hidden: torch.Tensor, batch: InputBatch, copies: HostCopies, errors: dict[str, str]
    ) -> list[PooledRows]:
        """Copy needed hidden states [num_outputs, hidden] to the host. Adds failed requests to `errors`."""
        taken: list[PooledRows] = []
        for index, request in enumerate(inputs.requests):
            pooling = request.sampling_params.pooling
            if pooling is None:
                continue
            is_complete = index in inputs.sampled
            if pooling == "last" and not is_complete:
                continue
            first, end = (int(row) for row in inputs.output_start[index : index + 2])
            try:
                states = hidden[end - 1 if pooling == "last" else first : end].to(torch.float32, copy=True)
                position = int(batch.num_computed_tokens[request.row])
                taken.append(PooledRows(request, copies.to_host(states), position, is_complete))
            except BaseException as error:  # noqa: BLE001
                log_fault(request.request_id, "its hidden states were taken", error)
                errors[request.request_id] = ErrorCode.REQUEST_FAILED
        return taken

    def pool(self, taken: Iterable[PooledRows], errors: dict[str, str]) -> dict[str, bytes]:
        """Return complete prompts' embeddings as float32 bytes, once the copies have ended.

        Adds failed requests to `errors`.
        """
        result: dict[str, bytes] = {}
        for rows in taken:
            request_id = rows.request.request_id
            try:
                vector = self._pool(rows)
            except BaseException as error:  # noqa: BLE001
                log_fault(request_id, "its hidden states were pooled", error)
                errors[request_id] = ErrorCode.REQUEST_FAILED
                continue
            if vector is not None:
                result[request_id] = vector
        return result

    def _pool(self, rows: PooledRows) -> bytes | None:
        states: NDArray[np.float32] = rows.states.numpy()
        if rows.request.sampling_params.pooling == "last":
            (last,) = states
            return bytes(last.tobytes())
        total = self._add(rows.request.request_id, rows.position, states)
        return (total.total / total.num_tokens).astype(np.float32).tobytes() if rows.is_complete else None

    def _add(self, request_id: str, position: int, rows: NDArray[np.float32]) -> _Sum:
        kept = self._sums.get(request_id)
        if kept is None or kept.num_tokens != position:
            if position:
                raise ValueError(f"{position} positions of {request_id} are missing")
            kept = self._sums[request_id] = _Sum(np.zeros(rows.shape[1]))
        for row in rows:
            kept.total += row
        kept.num_tokens += len(rows)
        return kept
