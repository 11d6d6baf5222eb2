"""Decides which drafts are kept, and how a draft model draws them: exactly, or by classic rejection sampling.

Both choose a token in every row of logits. A draft is kept if it equals the choice; the first choice that differs is
kept, too. Exact verification chooses the token that would have come without drafts. Rejection sampling chooses the
draft more often if it was drawn from a distribution like the target's: the answer then has the same distribution as
without drafts, but is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.kernels.noise import Stream, uniform_noise
from octavo.kernels.rejection_sampling import draw, filtered_probs, rejection_sampling_batched
from octavo.sampling_params import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.config import SpeculativeConfig
    from octavo.kernels.interface import Kernels, SamplingRows

_SLICE_LOGITS = 1 << 18  # whose distributions stand in memory at a time, or those of one request
_BYTES_PER_LOGIT = 128  # p, q and their difference in float64; sorted values, ids and sums of the filters


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Requests whose drafts are verified, and their rows of logits.

    is_greedy         of each request
    cu_num_logits     int32 [num_requests + 1], the first row of each, then the number of rows
    draft_ids         int64 [num_logits], the token that was each row's input: behind a request's first row its drafts
    draft_probs       float32 [num_drafts or more, vocab] of a request whose drafts were drawn: the distribution of each
    """

    is_greedy: Sequence[bool]
    cu_num_logits: NDArray[np.int32]
    draft_ids: NDArray[np.int64]
    draft_probs: Sequence[Tensor | None]


class Verification(Protocol):
    """One way of it."""

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """Return what it takes at most for so many drafts in a step, besides their rows of logits."""
        ...

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """Return the choice of each row of float32 [num_logits, vocab] as int64, -1 where there is none to be made.

        Behind a choice that is not the draft, those of the request are of no use.
        """
        ...

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor | None]:
        """Return a draft for each row of a drafting model's logits, int64 [n], -1 where there is none to be drawn.

        And the distributions they were drawn from, float32 [n, vocab], where these have to be known to verify them.
        Then whether a draft is verified must not hang on which token it is.
        """
        ...


class ExactVerification:
    """The choice is that of the sampling kernel, which knows of no draft; a drafting model's is made with its noise."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """Return 0."""
        del num_drafts, vocab_size
        return 0

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """Return what the sampling kernel says."""
        del drafted
        return self._kernels.sample(logits, rows)

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, None]:
        """Return what the sampling kernel says."""
        return self._kernels.sample(logits, rows), None


class RejectionVerification:
    """See `octavo.kernels.rejection_sampling`. The sampling kernel still has the choice behind the last draft.

    So it has those of requests without drafts, and of greedy ones, for which rejection sampling is the same.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def num_bytes(self, num_drafts: int, vocab_size: int) -> int:
        """Return bytes of the distributions that drafts were drawn from, and of what is verified at a time."""
        at_once = max(_SLICE_LOGITS, (MAX_DRAFTS + 1) * vocab_size)
        return num_drafts * vocab_size * 4 + at_once * _BYTES_PER_LOGIT

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """Return the drafts that are accepted, and what stands behind them."""
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
        """Draw from what the sampling kernel draws from, in a stream of its own."""
        probs, ids = torch.empty_like(logits), torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        uniform = uniform_noise(rows.seed, rows.position, rows.sample_index, Stream.DRAFT).to(logits.device)
        max_rows = max(_SLICE_LOGITS // logits.shape[1], 1)
        for part in (slice(i, i + max_rows) for i in range(0, len(logits), max_rows)):
            probs[part] = filtered_probs(logits[part], rows.take(part))
            ids[part] = draw(probs[part], uniform[part])
        return ids, probs


def create_verification(config: SpeculativeConfig | None, kernels: Kernels) -> Verification:
    """Return the one that was asked for."""
    if config is not None and config.verification == "rejection":
        return RejectionVerification(kernels)
    return ExactVerification(kernels)


def _parts(drafted: DraftedRows, max_rows: int) -> Iterator[list[int]]:
    """Divide the requests that are sampled and have drafts: at most so many rows together, drawn drafts or none."""
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
    """Return the distributions of the drafts of a part row by row, and anything in each request's last row."""
    probs: list[Tensor] = []
    for index, count in zip(part, num_rows.tolist(), strict=True):
        of_request = drafted.draft_probs[index]
        if of_request is None:
            return None
        probs += [of_request[: count - 1], of_request[:1]]
    return torch.cat(probs)
