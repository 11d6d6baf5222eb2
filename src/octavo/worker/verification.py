"""Decides which drafts are accepted, and how a draft model draws drafts.

Each row of logits gets a choice. A request's choices are accepted up to and including the first choice that differs
from the draft at its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.kernels.noise import RandomStream, uniform_noise
from octavo.kernels.rejection_sampling import draw, filtered_probs, rejection_sampling_batched
from octavo.sampling_params import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.config import SpeculativeConfig
    from octavo.kernels.interface import Kernels, SamplingRows

_SLICE_LOGITS = 1 << 18  # processed together; one request may exceed it
_BYTES_PER_LOGIT = 128  # p, q and their difference in float64; the filters' values, ids and sums


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Requests with or without drafts to verify.

    cu_num_logits: int32 [num_requests + 1], each request's first row, then the total.
    draft_ids: int64 [num_logits], input tokens: drafts in all of a request's rows except the first.
    draft_probs: float32 [num_drafts or more, vocab] per request, or None if drafts were not drawn.
    """

    is_greedy: Sequence[bool]
    cu_num_logits: NDArray[np.int32]
    draft_ids: NDArray[np.int64]
    draft_probs: Sequence[Tensor | None]


class Verification(Protocol):
    """Chooses tokens and draws drafts."""

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """Return the most bytes that verification allocates, without the logits."""
        ...

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """Return each row's choice as int64, or -1 if no token can be chosen. logits: float32 [num_logits, vocab].

        A choice is meaningless if an earlier choice of the request differs from its draft.
        """
        ...

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor | None]:
        """Return a draft per row of logits, or -1 if none can be drawn.

        Also return the distributions, float32 [n, vocab], or None if verification does not need them. If they are
        returned, the decision to verify a draft must not depend on the draft's token.
        """
        ...


class ExactVerification:
    """Chooses tokens and draws drafts with the sampling kernel. A position's token and draft get equal noise."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """See `Verification`."""
        del num_drafts, vocab_size
        return 0

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """See `Verification`."""
        del drafted
        return self._kernels.sample(logits, rows)

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, None]:
        """See `Verification`."""
        return self._kernels.sample(logits, rows), None


class RejectionVerification:
    """Rejection sampling. Greedy requests, and tokens after the last draft, use the sampling kernel."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """See `Verification`."""
        at_once = max(_SLICE_LOGITS, (MAX_DRAFTS + 1) * vocab_size)
        return num_drafts * vocab_size * 4 + at_once * _BYTES_PER_LOGIT

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """See `Verification`."""
        chosen = self._kernels.sample(logits, rows)
        first, num_rows = drafted.cu_num_logits[:-1], np.diff(drafted.cu_num_logits)
        draft_ids = torch.from_numpy(drafted.draft_ids).to(logits.device)
        for part in _parts(drafted, max(_SLICE_LOGITS // logits.shape[1], 1)):
            counts = num_rows[part]
            steps = np.arange(counts.max())
            is_row = steps < counts[:, None]
            indices = torch.from_numpy((first[part, None] + steps)[is_row].astype(np.int64)).to(logits.device)
            rows_of_part = rows.take(indices)
            sampled, _ = rejection_sampling_batched(
                chosen[indices],
                draft_ids[indices],
                torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32)).to(logits.device),
                len(steps) - 1,
                target_probs=filtered_probs(logits[indices], rows_of_part),
                draft_probs=_draft_probs(drafted, part, counts),
                rows=rows_of_part,
            )
            tokens = sampled[torch.from_numpy(is_row).to(logits.device)]
            chosen[indices] = torch.where(tokens < 0, chosen[indices], tokens)
        return chosen

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Draw drafts with noise that verification does not use."""
        probs, ids = torch.empty_like(logits), torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        uniform = uniform_noise(rows.seed, rows.position, rows.sample_index, RandomStream.DRAFT).to(logits.device)
        max_rows = max(_SLICE_LOGITS // logits.shape[1], 1)
        for part in (slice(i, i + max_rows) for i in range(0, len(logits), max_rows)):
            probs[part] = filtered_probs(logits[part], rows.take(part))
            ids[part] = draw(probs[part], uniform[part])
        return ids, probs


def create_verification(config: SpeculativeConfig | None, kernels: Kernels) -> Verification:
    """Return the configured verification."""
    if config is not None and config.verification == "rejection":
        return RejectionVerification(kernels)
    return ExactVerification(kernels)


def _parts(drafted: DraftedRows, max_rows: int) -> Iterator[list[int]]:
    """Divide non-greedy requests with drafts into parts of up to `max_rows` rows.

    A request with more rows is a part of its own. In a part, all drafts or none were drawn.
    """
    num_rows = np.diff(drafted.cu_num_logits).tolist()
    for is_drawn in (False, True):
        part: list[int] = []
        rows_of_part = 0
        for index, count in enumerate(num_rows):
            if count < 2 or drafted.is_greedy[index] or (drafted.draft_probs[index] is not None) != is_drawn:
                continue
            if part and rows_of_part + count > max_rows:
                yield part
                part, rows_of_part = [], 0
            part.append(index)
            rows_of_part += count
        if part:
            yield part


def _draft_probs(drafted: DraftedRows, part: Sequence[int], num_rows: NDArray[np.int32]) -> Tensor | None:
    probs: list[Tensor] = []
    for index, count in zip(part, num_rows.tolist(), strict=True):
        of_request = drafted.draft_probs[index]
        if of_request is None:
            return None
        probs += [of_request[: count - 1], of_request[:1]]
    return torch.cat(probs)
