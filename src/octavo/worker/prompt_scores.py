"""Computes prompt tokens' log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from octavo.kernels.operations.log_softmax import log_softmax
from octavo.outputs import ErrorCode
from octavo.runtime.faults import log_fault
from octavo.worker.memory import PROMPT_LOGPROBS_SLICE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from numpy.typing import NDArray

    from octavo.data.model_output import TokenLogprobs
    from octavo.models.layers import CausalLM
    from octavo.worker.host_copies import HostCopies
    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow
    from octavo.worker.sampler import LogprobRows, Sampler


def slices_of(
    inputs: ModelInputs, hidden: torch.Tensor, batch: InputBatch
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    """Yield (next tokens, hidden states) of prompts to score, up to PROMPT_LOGPROBS_SLICE_ROWS rows at a time."""
    for request, (first, end) in zip(inputs.requests, pairwise(inputs.output_start.tolist()), strict=True):
        if request.sampling_params.prompt_logprobs is not None:
            yield from _slices(request, hidden[first:end], batch)


def _slices(
    request: RequestRow, hidden: torch.Tensor, batch: InputBatch
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    position = int(batch.num_computed_tokens[request.row])
    num_rows = min(len(hidden), request.num_prompt_tokens - 1 - position)
    targets = batch.token_ids[request.row, position + 1 : position + 1 + max(num_rows, 0)].astype(np.int64)
    for start in range(0, len(targets), PROMPT_LOGPROBS_SLICE_ROWS):
        part = targets[start : start + PROMPT_LOGPROBS_SLICE_ROWS]
        yield part, hidden[start : start + len(part)].clone()  # aligned; otherwise another kernel would be compiled


@dataclass(frozen=True, slots=True)
class PromptScores:
    """For each slice of a prompt, its tokens and their log probabilities, which are being copied to the host."""

    request: RequestRow
    parts: list[tuple[list[int], LogprobRows]]


class PromptScorer:
    """Computes `SamplingParams.prompt_logprobs`. has_ranks: True if a request's error fails the step."""

    def __init__(
        self, model: CausalLM, batch: InputBatch, sampler: Sampler, copies: HostCopies, *, has_ranks: bool = False
    ) -> None:
        self._has_ranks = has_ranks
        self._model = model
        self._batch = batch
        self._sampler = sampler
        self._copies = copies

    def score(self, inputs: ModelInputs, hidden: torch.Tensor, errors: dict[str, str]) -> list[PromptScores]:
        """Score prompt tokens after hidden states [num_outputs, hidden]. Adds failed requests to `errors`."""
        result: list[PromptScores] = []
        for index, request in enumerate(inputs.requests):
            count = request.sampling_params.prompt_logprobs
            if count is None:
                continue
            first_row, end_row = (int(row) for row in inputs.output_start[index : index + 2])
            try:
                parts = self._score(request, hidden[first_row:end_row], count)
            except BaseException as error:
                if self._has_ranks:  # otherwise only the other ranks would compute the remaining slices
                    raise
                log_fault(request.request_id, "its prompt was scored", error)
                errors[request.request_id] = ErrorCode.REQUEST_FAILED
                continue
            if parts:
                result.append(PromptScores(request, parts))
        return result

    def _score(self, request: RequestRow, hidden: torch.Tensor, num_best: int) -> list[tuple[list[int], LogprobRows]]:
        parts: list[tuple[list[int], LogprobRows]] = []
        for part, rows in _slices(request, hidden, self._batch):
            logprobs = self._model.compute_logits(rows)
            log_softmax(self._model.kernels, logprobs)
            token_ids, counts = self._copies.to_device(part), [num_best] * len(part)
            parts.append((part.tolist(), self._sampler.token_logprobs(logprobs, token_ids, counts)))
        return parts

    @staticmethod
    def read(scores: Iterable[PromptScores], errors: dict[str, str]) -> dict[str, list[TokenLogprobs]]:
        """Return log probabilities, once the copies have ended. Adds failed requests to `errors`."""
        result: dict[str, list[TokenLogprobs]] = {}
        for each in scores:
            name = each.request.request_id
            try:
                result[name] = [entry for token_ids, rows in each.parts for entry in rows.read(token_ids)]
            except BaseException as error:  # noqa: BLE001
                log_fault(name, "its prompt's scores were read", error)
                errors[name] = ErrorCode.REQUEST_FAILED
        return result
