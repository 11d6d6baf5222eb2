"""From logits to tokens. A token is a pure function of its row of logits, the request's parameters and its seed.

Order as in vLLM: log probabilities are those of the raw logits; then allowed ids, logit bias and min_tokens, then
penalties; temperature, min_p, top_k, top_p and the choice are one kernel, with `octavo.worker.typical` before it for
who asks for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.kernels.interface import SamplingRows
from octavo.model_output import TokenLogprobs
from octavo.worker.typical import keep_typical

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.kernels.interface import Kernels
    from octavo.sampling_params import SamplingParams

_INT64_SIGN = 1 << 63


@dataclass(frozen=True, slots=True)
class SampleTask:
    """One row of logits to choose from. known_tokens: prompt and output so far. allowed: bool [vocab], by a grammar."""

    request_id: str
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    known_tokens: NDArray[np.int32]
    num_prompt_tokens: int
    allowed: NDArray[np.bool_] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.known_tokens) - self.num_prompt_tokens

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything changes the row before the temperature; most requests ask for none of it."""
        params = self.sampling_params
        return bool(
            self.allowed is not None
            or params.allowed_token_ids is not None
            or params.logit_bias
            or self.num_output_tokens < params.min_tokens
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: one per task, -1 where the logits were no numbers. logprobs: of the tasks that asked for them."""

    token_ids: list[int]
    logprobs: dict[str, TokenLogprobs]


class Sampler:
    """Chooses one token per row."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, tasks: Sequence[SampleTask]) -> Sampled:
        """Choose a token for every row of float32 [len(tasks), vocab]; the logits are changed in place."""
        with_logprobs = [i for i, task in enumerate(tasks) if task.sampling_params.logprobs is not None]
        raw_logprobs = torch.log_softmax(logits[with_logprobs], dim=-1) if with_logprobs else None
        for index, task in enumerate(tasks):
            if task.adjusts_logits:
                _adjust(logits[index], task)
            if task.sampling_params.typical_p < 1.0:
                keep_typical(logits[index], task.sampling_params, self._kernels)
        token_ids: list[int] = self._kernels.sample(logits, _sampling_rows(tasks, logits.device)).tolist()
        logprobs = {}
        if raw_logprobs is not None:
            chosen = [max(token_ids[i], 0) for i in with_logprobs]
            counts = [tasks[i].sampling_params.logprobs or 0 for i in with_logprobs]
            entries = self.token_logprobs(raw_logprobs, chosen, counts)
            logprobs = {tasks[i].request_id: entry for i, entry in zip(with_logprobs, entries, strict=True)}
        return Sampled(token_ids, logprobs)

    def token_logprobs(
        self, logprobs: Tensor, token_ids: Sequence[int], num_best: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Report each row's token and its `num_best` most probable ones, from float32 log probabilities [n, vocab]."""
        own = logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids, device=logprobs.device)]
        ranks = (logprobs > own[:, None]).sum(dim=-1) + 1
        most = min(max(num_best), logprobs.shape[-1])
        best_values: list[list[float]] = [[]] * len(token_ids)
        best_ids: list[list[int]] = [[]] * len(token_ids)
        if most:
            values, ids = self._kernels.top_tokens(logprobs, most)
            best_values, best_ids = values.tolist(), ids.tolist()
        return [
            TokenLogprobs([token_id, *ids[:count]], [value, *values[:count]], rank)
            for token_id, value, rank, ids, values, count in zip(
                token_ids, own.tolist(), ranks.tolist(), best_ids, best_values, num_best, strict=True
            )
        ]


def _adjust(row: Tensor, task: SampleTask) -> None:
    """Apply what changes a row before the temperature. Mutates `row` [vocab]."""
    params = task.sampling_params
    if task.allowed is not None:
        row.masked_fill_(torch.from_numpy(~task.allowed).to(row.device), -torch.inf)
    if params.allowed_token_ids is not None:
        allowed = row[params.allowed_token_ids].clone()
        row.fill_(-torch.inf)
        row[params.allowed_token_ids] = allowed
    if task.num_output_tokens < params.min_tokens and task.stop_token_ids:
        row[list(task.stop_token_ids)] = -torch.inf
    if params.logit_bias:
        ids = list(params.logit_bias)
        row[ids] += torch.tensor([params.logit_bias[i] for i in ids], dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(task.known_tokens)).to(row.device)
        values = row[seen]
        penalized = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = torch.where(values.isinf(), values, penalized)  # -inf times what underflows to zero is no number
    if params.presence_penalty or params.frequency_penalty:
        ids_array, counts = np.unique(task.known_tokens[task.num_prompt_tokens :], return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(ids_array).to(row.device)] -= torch.from_numpy(penalty).to(row)


def _sampling_rows(tasks: Sequence[SampleTask], device: torch.device) -> SamplingRows:
    params = [task.sampling_params for task in tasks]
    # What `keep_typical` has left needs no other filter.
    filters = [(p.top_k, p.top_p, p.min_p) if p.typical_p == 1.0 else (0, 1.0, 0.0) for p in params]
    top_k, top_p, min_p = map(list, zip(*filters, strict=True)) if filters else ([], [], [])

    def tensor(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature=tensor([p.temperature for p in params], torch.float32),
        top_k=tensor(top_k, torch.int32),
        top_p=tensor(top_p, torch.float32),
        min_p=tensor(min_p, torch.float32),
        seed=tensor([_as_int64(task.seed) for task in tasks], torch.int64),
        sample_index=tensor([task.sample_index for task in tasks], torch.int32),
        position=tensor([len(task.known_tokens) for task in tasks], torch.int32),
    )


def _as_int64(seed: int) -> int:
    """Keep all 64 bits of a seed in a signed integer."""
    return (seed + _INT64_SIGN) % (1 << 64) - _INT64_SIGN
