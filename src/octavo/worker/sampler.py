"""Chooses tokens from logits.

A token depends only on its logits, the request's parameters, known tokens and grammar, and the noise of (seed,
position, sample index). Log probabilities are computed first. Then the grammar is applied, then, in vLLM's order,
allowed ids, min_tokens, logit bias, penalties, typical sampling and the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.model_output import TokenLogprobs
from octavo.kernels.interface import SamplingRows
from octavo.kernels.operations.log_softmax import log_softmax
from octavo.runtime.faults import is_fault
from octavo.worker.host_copies import SharedMemory
from octavo.worker.typical import keep_typical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.kernels.interface import Kernels
    from octavo.sampling_params import SamplingParams
    from octavo.worker.host_copies import HostCopies

_INT64_SIGN = 1 << 63


class SamplingColumns:
    """The sampling kernel's parameters, a row per request.

    is_plain: True if the row needs no `SampleTask`. reads_tokens: True if the task reads tokens on the host.
    is_simple: True if the row is plain and has no filters.
    """

    def __init__(self, num_rows: int, copies: HostCopies) -> None:
        self.is_plain = np.zeros(num_rows, dtype=bool)
        self.reads_tokens = np.zeros(num_rows, dtype=bool)
        self.is_simple = np.zeros(num_rows, dtype=bool)
        self._tensors = copies.to_device_together
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._top_p = np.zeros(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.int64)
        self._sample_index = np.zeros(num_rows, dtype=np.int32)
        self._gathered: list[Tensor] | None = None
        self._gathered_key = b""

    def set(self, row: int, params: SamplingParams, seed: int, sample_index: int) -> None:
        """Store a request's parameters."""
        self.is_plain[row], self.reads_tokens[row] = _is_plain(params), _reads_tokens(params)
        self.is_simple[row] = is_simple(params)
        self._temperature[row] = params.temperature
        filters = (params.top_k, params.top_p, params.min_p) if params.typical_p == 1.0 else (0, 1.0, 0.0)
        self._top_k[row], self._top_p[row], self._min_p[row] = filters
        self._seed[row] = _as_int64(seed)
        self._sample_index[row] = sample_index
        self._gathered = None

    def gather(self, rows: NDArray[np.int64], position: Tensor) -> SamplingRows:
        """Return rows' parameters on the device. Copies them only after changes.

        position: int32 [len(rows)] on the device, numbers of known tokens.
        """
        key = rows.tobytes()
        if self._gathered is None or key != self._gathered_key:
            columns = self._temperature, self._top_k, self._top_p, self._min_p, self._seed, self._sample_index
            self._gathered, self._gathered_key = self._tensors([column[rows] for column in columns]), key
        temperature, top_k, top_p, min_p, seed, sample_index = self._gathered
        return SamplingRows(temperature, top_k, top_p, min_p, seed, sample_index, position)


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Work on a row of logits outside the kernel.

    known_tokens: if `SamplingColumns.reads_tokens` is False, only their number is used. allowed: the grammar's mask,
    bool [vocab].
    """

    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    known_tokens: NDArray[np.int32]
    num_prompt_tokens: int
    allowed: NDArray[np.bool_] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.known_tokens) - self.num_prompt_tokens

    @property
    def adjusts_logits(self) -> bool:
        """True if logits change before the temperature is applied."""
        params = self.sampling_params
        return self.allowed is not None or self.num_output_tokens < params.min_tokens or _changes_every_row(params)

    @property
    def excludes_tokens(self) -> bool:
        """True if tokens are excluded before the temperature is applied."""
        is_early = self.num_output_tokens < self.sampling_params.min_tokens
        return self.allowed is not None or self.sampling_params.allowed_token_ids is not None or is_early


def _changes_every_row(params: SamplingParams) -> bool:
    return bool(params.allowed_token_ids is not None or params.logit_bias or _is_penalized(params))


def _is_penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _reads_tokens(params: SamplingParams) -> bool:
    return params.structured_outputs is not None or _is_penalized(params)


def _is_plain(params: SamplingParams) -> bool:
    return (
        params.structured_outputs is None
        and params.logprobs is None
        and params.typical_p == 1.0
        and params.min_tokens == 0
        and not _changes_every_row(params)
    )


def is_simple(params: SamplingParams) -> bool:
    """Return True if tokens are sampled without a `SampleTask` and without filters."""
    return _is_plain(params) and (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """All rows' results.

    token_ids: -1 if logits are NaN or no token is allowed. none_allowed: rows without an allowed token.
    """

    token_ids: list[int]
    none_allowed: set[int]
    logprobs: dict[int, TokenLogprobs]
    faults: dict[int, BaseException]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of each row's token and best tokens, being copied to the host.

    ranks: int64 [n]. values, ids: [n, most], or None if no row wants best tokens.
    """

    sampled: Tensor
    ranks: Tensor
    values: Tensor | None
    ids: Tensor | None
    num_best: Sequence[int]

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Return rows' entries, once the copies have ended."""
        best_values: list[list[float]] = [[]] * len(token_ids) if self.values is None else self.values.tolist()
        best_ids: list[list[int]] = [[]] * len(token_ids) if self.ids is None else self.ids.tolist()
        return [
            TokenLogprobs([token_id, *ids[:count]], [value, *values[:count]], rank)
            for token_id, value, rank, ids, values, count in zip(
                token_ids, self.sampled.tolist(), self.ranks.tolist(), best_ids, best_values, self.num_best, strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Choices:
    """Tokens chosen for rows of logits, being copied to the host.

    restricted: rows with excluded tokens. are_numbers: for each restricted row, False if a logit is NaN.
    """

    token_ids: Tensor
    to_read: Tensor
    restricted: list[int]
    are_numbers: Tensor | None
    logprobs: list[tuple[list[int], LogprobRows]]
    faults: dict[int, BaseException]

    def read(self) -> Sampled:
        """Return the results, once the copies have ended."""
        token_ids: list[int] = self.to_read.tolist()
        entries: dict[int, TokenLogprobs] = {}
        for rows, logprobs in self.logprobs:
            entries.update(zip(rows, logprobs.read([max(token_ids[row], 0) for row in rows]), strict=True))
        none_allowed: set[int] = set()
        if self.are_numbers is not None:
            are_numbers = zip(self.restricted, self.are_numbers.tolist(), strict=True)
            none_allowed = {row for row, good in are_numbers if good and token_ids[row] < 0}
        return Sampled(token_ids, none_allowed, entries, self.faults)


class Sampler:
    """Chooses one token per row. Only typical sampling waits for the device."""

    def __init__(self, kernels: Kernels, copies: HostCopies | None = None) -> None:
        self._kernels = kernels
        self._copies = copies or SharedMemory()

    def choose(
        self,
        logits: Tensor,
        rows: SamplingRows,
        tasks: Mapping[int, SampleTask],
        sample: Callable[[Tensor, SamplingRows], Tensor] | None = None,
    ) -> Choices:
        """Choose a token per row of float32 [n, vocab]. Mutates logits. sample: replaces `Kernels.sample`."""
        copies = self._copies
        if not tasks:
            token_ids = (sample or self._kernels.sample)(logits, rows)
            return Choices(token_ids, copies.to_host(token_ids), [], None, [], {})
        with_logprobs = [row for row, task in tasks.items() if task.sampling_params.logprobs is not None]
        indices = copies.to_device(np.array(with_logprobs)) if with_logprobs else None
        raw_logprobs = None if indices is None else logits[indices]
        if raw_logprobs is not None:
            log_softmax(self._kernels, raw_logprobs)
        faults = self.adjust(logits, tasks)
        restricted = [row for row, task in tasks.items() if task.excludes_tokens]
        are_numbers = None
        if restricted:
            are_numbers = copies.to_host(~logits[copies.to_device(np.array(restricted))].isnan().any(dim=-1))
        token_ids = (sample or self._kernels.sample)(logits, rows)
        logprobs: list[tuple[list[int], LogprobRows]] = []
        if raw_logprobs is not None:
            counts = [tasks[row].sampling_params.logprobs or 0 for row in with_logprobs]
            logprobs = self._logprobs(raw_logprobs, with_logprobs, token_ids[indices].clamp(min=0), counts, faults)
        return Choices(token_ids, copies.to_host(token_ids), restricted, are_numbers, logprobs, faults)

    def read_choices(self, token_ids: Tensor) -> Choices:
        """Start to copy tokens that were chosen without tasks."""
        return Choices(token_ids, self._copies.to_host(token_ids), [], None, [], {})

    def adjust(self, logits: Tensor, tasks: Mapping[int, SampleTask]) -> dict[int, BaseException]:
        """Apply tasks to the logits in place. Return exceptions by failed row."""
        faults: dict[int, BaseException] = {}
        for row, task in tasks.items():
            try:
                if task.adjusts_logits:
                    _adjust(logits[row], task, self._copies.to_device)
                if task.sampling_params.typical_p < 1.0:
                    keep_typical(logits[row], task.sampling_params, self._kernels)
            except BaseException as error:  # noqa: BLE001 - fails one request
                faults[row] = error
        return faults

    def _logprobs(
        self,
        logprobs: Tensor,
        rows: list[int],
        token_ids: Tensor,
        num_best: Sequence[int],
        faults: dict[int, BaseException],
    ) -> list[tuple[list[int], LogprobRows]]:
        try:
            return [(rows, self.token_logprobs(logprobs, token_ids, num_best))]
        except BaseException as error:
            if not is_fault(error):
                raise
        found = []
        for index, row in enumerate(rows):
            part = slice(index, index + 1)
            try:
                found.append(([row], self.token_logprobs(logprobs[part], token_ids[part], num_best[part])))
            except BaseException as error:  # noqa: BLE001
                faults[row] = error
        return found

    def token_logprobs(self, logprobs: Tensor, token_ids: Tensor, num_best: Sequence[int]) -> LogprobRows:
        """Select each row's token and best tokens from logprobs [n, vocab]."""
        sampled = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > sampled).sum(dim=-1) + 1
        most = min(max(num_best), logprobs.shape[-1])
        to_host = self._copies.to_host
        values, ids = map(to_host, self._kernels.top_tokens(logprobs, most)) if most else (None, None)
        return LogprobRows(to_host(sampled[:, 0]), to_host(ranks), values, ids, num_best)


def _adjust(row: Tensor, task: SampleTask, to_device: Callable[[NDArray[np.generic]], Tensor]) -> None:
    params = task.sampling_params
    if task.allowed is not None:
        row.masked_fill_(to_device(~task.allowed), -torch.inf)
    if params.allowed_token_ids is not None:
        allowed_ids = to_device(np.array(params.allowed_token_ids, dtype=np.int64))
        allowed = row[allowed_ids]
        row.fill_(-torch.inf)
        row[allowed_ids] = allowed
    if task.num_output_tokens < params.min_tokens and task.stop_token_ids:
        row[to_device(np.array(list(task.stop_token_ids), dtype=np.int64))] = -torch.inf
    if params.logit_bias:
        ids = to_device(np.array(list(params.logit_bias), dtype=np.int64))
        row[ids] += to_device(np.array(list(params.logit_bias.values()), dtype=np.float32))
    if params.repetition_penalty != 1.0:
        seen = to_device(np.unique(task.known_tokens))
        values = row[seen]
        penalized = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = torch.where(values.isinf(), values, penalized)  # -inf * 0 would be NaN
    if params.presence_penalty or params.frequency_penalty:
        ids_array, counts = np.unique(task.known_tokens[task.num_prompt_tokens :], return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[to_device(ids_array)] -= to_device(penalty.astype(np.float32))


def _as_int64(seed: int) -> int:
    return (seed + _INT64_SIGN) % (1 << 64) - _INT64_SIGN
