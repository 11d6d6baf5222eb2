"""From logits to tokens. A token is a pure function of its row of logits, the request's parameters and its seed.

Order as in vLLM: log probabilities are those of the raw logits; then allowed ids, logit bias and min_tokens, then
penalties; temperature, min_p, top_k, top_p and the choice are one kernel, with `octavo.worker.typical` before it for
who asks for that. Most requests ask for nothing but the kernel: its parameters stand in columns, a row for each request
that the worker knows, and only the others of a step are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.model_output import TokenLogprobs
from octavo.kernels.interface import SamplingRows
from octavo.runtime.faults import is_fault
from octavo.worker.typical import keep_typical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.kernels.interface import Kernels
    from octavo.sampling_params import SamplingParams

_INT64_SIGN = 1 << 63


class SamplingColumns:
    """What the sampling kernel needs of every request that the worker knows, a row each.

    is_plain  bool [rows]  nothing else is asked of the row's request: no `SampleTask`
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.is_plain = np.zeros(num_rows, dtype=bool)
        self._tensor = partial(on_device, device=device)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._top_p = np.zeros(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.int64)
        self._sample_index = np.zeros(num_rows, dtype=np.int32)
        self._gathered: SamplingRows | None = None  # of the rows in `_gathered_key`, until a row changes
        self._gathered_key = b""

    def set(self, row: int, params: SamplingParams, seed: int, sample_index: int) -> None:
        """Note a request's parameters in its row."""
        self.is_plain[row] = _is_plain(params)
        self._temperature[row] = params.temperature
        # What `keep_typical` has left needs no other filter.
        filters = (params.top_k, params.top_p, params.min_p) if params.typical_p == 1.0 else (0, 1.0, 0.0)
        self._top_k[row], self._top_p[row], self._min_p[row] = filters
        self._seed[row] = _as_int64(seed)
        self._sample_index[row] = sample_index
        self._gathered = None

    def gather(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> SamplingRows:
        """Return the parameters of these rows, whose requests know so many tokens, beside the logits.

        Those of the step before are taken again where the rows are the same: only their positions move.
        """
        position = self._tensor(num_tokens.astype(np.int32))
        key = rows.tobytes()
        if self._gathered is not None and key == self._gathered_key:
            return replace(self._gathered, position=position)
        self._gathered_key = key
        self._gathered = SamplingRows(
            temperature=self._tensor(self._temperature[rows]),
            top_k=self._tensor(self._top_k[rows]),
            top_p=self._tensor(self._top_p[rows]),
            min_p=self._tensor(self._min_p[rows]),
            seed=self._tensor(self._seed[rows]),
            sample_index=self._tensor(self._sample_index[rows]),
            position=position,
        )
        return self._gathered


@dataclass(frozen=True, slots=True)
class SampleTask:
    """What a row of logits is to go through before and beside the sampling kernel.

    known_tokens: prompt and output so far. allowed: bool [vocab], by a grammar.
    """

    sampling_params: SamplingParams
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
        """Whether anything changes the row before the temperature."""
        params = self.sampling_params
        return self.allowed is not None or self.num_output_tokens < params.min_tokens or _changes_every_row(params)


def _changes_every_row(params: SamplingParams) -> bool:
    """Whether every row of logits of such a request is changed before the temperature, whatever came before."""
    return bool(
        params.allowed_token_ids is not None
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _is_plain(params: SamplingParams) -> bool:
    """Whether the sampling kernel does all that such a request asks for."""
    return (
        params.structured_outputs is None
        and params.logprobs is None
        and params.typical_p == 1.0
        and params.min_tokens == 0
        and not _changes_every_row(params)
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of each row.

    token_ids: one per row, -1 where the logits were no numbers. logprobs: of the rows whose tasks asked for them.
    faults: of the rows whose tasks could not be done.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    faults: dict[int, BaseException]


class Sampler:
    """Chooses one token per row."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        tasks: Mapping[int, SampleTask],
        choose: Callable[[Tensor, SamplingRows], Tensor] | None = None,
    ) -> Sampled:
        """Choose a token for every row of float32 [n, vocab]; the logits are changed in place.

        tasks: of the rows that ask for more than the kernel does. choose: what chooses in place of the kernel.
        """
        with_logprobs = [row for row, task in tasks.items() if task.sampling_params.logprobs is not None]
        raw_logprobs = torch.log_softmax(logits[with_logprobs], dim=-1) if with_logprobs else None
        faults = self.adjust(logits, tasks)
        token_ids: list[int] = (choose or self._kernels.sample)(logits, rows).tolist()
        if raw_logprobs is None:
            return Sampled(token_ids, {}, faults)
        chosen = [max(token_ids[row], 0) for row in with_logprobs]
        counts = [tasks[row].sampling_params.logprobs or 0 for row in with_logprobs]
        try:
            entries = self.token_logprobs(raw_logprobs, chosen, counts)
        except BaseException as error:
            if not is_fault(error):
                raise
            # Whose fault it is shows row by row.
            return Sampled(token_ids, self._logprobs_alone(raw_logprobs, with_logprobs, chosen, counts, faults), faults)
        return Sampled(token_ids, dict(zip(with_logprobs, entries, strict=True)), faults)

    def adjust(self, logits: Tensor, tasks: Mapping[int, SampleTask]) -> dict[int, BaseException]:
        """Apply what is asked of rows before the kernel, in place; return for which rows that failed, and how."""
        faults: dict[int, BaseException] = {}
        for row, task in tasks.items():
            try:
                if task.adjusts_logits:
                    _adjust(logits[row], task)
                if task.sampling_params.typical_p < 1.0:
                    keep_typical(logits[row], task.sampling_params, self._kernels)
            except BaseException as error:  # noqa: BLE001 - it is one request's, which is named where it is known
                faults[row] = error
        return faults

    def _logprobs_alone(
        self,
        logprobs: Tensor,
        rows: Sequence[int],
        token_ids: Sequence[int],
        num_best: Sequence[int],
        faults: dict[int, BaseException],
    ) -> dict[int, TokenLogprobs]:
        """Report each row by itself, which gives the same; note in faults where that fails."""
        found = {}
        for index, row in enumerate(rows):
            try:
                (found[row],) = self.token_logprobs(logprobs[index : index + 1], [token_ids[index]], [num_best[index]])
            except BaseException as error:  # noqa: BLE001
                faults[row] = error
        return found

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


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor there; on a CPU they share memory where the array is contiguous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _as_int64(seed: int) -> int:
    """Keep all 64 bits of a seed in a signed integer."""
    return (seed + _INT64_SIGN) % (1 << 64) - _INT64_SIGN
