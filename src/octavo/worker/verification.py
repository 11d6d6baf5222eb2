"""How it is decided which drafts stand, and how a drafting model draws them: exactly, or by classic rejection sampling.

Both make a choice in every row of logits: a draft stands where the choice is the draft, and so does the first choice
that is not. Exact verification chooses what would have come without drafts. Rejection sampling has the draft for its
choice more often where it was drawn from a distribution like the target's; the answer is then distributed as it would
be without drafts, and is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.kernels.noise import Stream, uniform_noise
from octavo.kernels.rejection_sampling import draw, filtered_probs, rejection_sampling_batched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    """One way of it. num_bytes(num_rows, vocab_size): what it takes besides logits of so many rows at once."""

    def num_bytes(self, num_rows: int, vocab_size: int) -> int:
        """See above."""
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
    """The choice is that of the sampling kernel, which knows of no draft. A drafting model draws with the same noise."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def num_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Return 0."""
        del num_rows, vocab_size
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

    def num_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Return bytes of the distributions that drafts were drawn from, and of a slice of rows."""
        return num_rows * vocab_size * 4 + max(_SLICE_LOGITS, 33 * vocab_size) * _BYTES_PER_LOGIT

    def choose(self, logits: Tensor, rows: SamplingRows, drafted: DraftedRows) -> Tensor:
        """Return the drafts that are accepted, and what stands behind them."""
        chosen = self._kernels.sample(logits, rows)
        first, num_rows = drafted.cu_num_logits[:-1], np.diff(drafted.cu_num_logits)
        draft_ids = torch.from_numpy(drafted.draft_ids).to(logits.device)
        for part in self._parts(drafted, logits.shape[1]):
            counts, most = num_rows[part], int(num_rows[part].max())
            steps = np.arange(most)
            in_use = steps < counts[:, None]
            indices = torch.from_numpy((first[part, None] + steps)[in_use].astype(np.int64)).to(logits.device)
            of_part = rows.take(indices)
            sampled, num_sampled = rejection_sampling_batched(
                chosen[indices],
                draft_ids[indices],
                torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32)).to(logits.device),
                most - 1,
                target_probs=filtered_probs(logits[indices], of_part),
                draft_probs=_stacked([drafted.draft_probs[i] for i in part], counts.tolist()),
                rows=of_part,
            )
            tokens = sampled[torch.from_numpy(in_use)]  # of each of the part's rows; -1 also behind those that stand
            ends = torch.from_numpy(steps)[None] < num_sampled.cpu()[:, None]
            stand = ends[torch.from_numpy(in_use)]
            chosen[indices[stand]] = tokens[stand]
        return chosen

    def draw_drafts(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Draw from what the sampling kernel draws from, in a stream of its own."""
        ids, probs = [], torch.empty_like(logits)
        for some in torch.arange(len(logits), device=logits.device).split(max(_SLICE_LOGITS // logits.shape[1], 1)):
            of_part = rows.take(some)
            probs[some] = filtered_probs(logits[some], of_part).float()
            place = (each.to(logits.device) for each in (of_part.seed, of_part.position, of_part.sample_index))
            ids.append(draw(probs[some], uniform_noise(*place, Stream.DRAFT)))
        return torch.cat(ids), probs
