"""Counts the tokens of experts."""

from __future__ import annotations

from operator import mul, truediv
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.expert_stats import ExpertLoad, ExpertTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.models.expert_layer import Experts
    from octavo.worker.host_copies import HostCopies

_ALIGNMENT = 4  # numbers; Triton recompiles for other alignments


class ExpertTally:
    """Counts tokens by layer and expert.

    tokens: totals. layers: at least one. Replayed passes also write `Experts.starts`, so their tokens are included in
    the totals, and so are their padding rows.
    """

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        numbers = [each.config.router.num_experts for each in layers]
        shape = len(layers), max(numbers)
        width = -(-(shape[1] + 1) // _ALIGNMENT) * _ALIGNMENT
        self._starts = torch.zeros(shape[0], width, dtype=torch.int32, device=device)
        for layer, number, row in zip(layers, numbers, self._starts, strict=True):
            layer.starts = row[width - number - 1 :]  # earlier columns stay zero
        self._first = width - shape[1]  # column of the first expert's end
        self._num_experts = numbers
        self._expert_bytes = [each.bytes_per_expert for each in layers]
        self._num_chosen = [each.config.router.num_chosen for each in layers]
        self._load_of_row = self._load(self._num_chosen, self._num_chosen, [1] * len(layers))
        self.tokens = ExpertTokens(shape[1], bytearray(8 * shape[0] * shape[1]))
        self._totals = np.frombuffer(self.tokens.counts, dtype=np.int64).reshape(shape)

    def begin(self, num_outputs: int) -> None:
        """Begin a step. Without outputs, the last layers are skipped, so clear the counts of the previous step."""
        if not num_outputs:
            self._starts.zero_()

    def take(self, copies: HostCopies) -> Tensor:
        """Return `Experts.starts` of all layers; see `HostCopies.to_host`."""
        return copies.to_host(self._starts)

    def read(self, starts: Tensor) -> ExpertLoad | None:
        """Add a step to the totals. Return the step's load, or None without tokens."""
        ends = starts.numpy()
        num_tokens: list[int] = ends[:, -1].tolist()
        if not any(num_tokens):
            return None
        counts = ends[:, self._first :] - ends[:, self._first - 1 : -1]
        self._totals += counts
        if num_tokens == self._num_chosen:
            return self._load_of_row
        return self._load(
            num_tokens, np.add.reduce(counts > 0, axis=1).tolist(), np.maximum.reduce(counts, axis=1).tolist()
        )

    def _load(self, num_tokens: list[int], num_reads: list[int], busiest: list[int]) -> ExpertLoad:
        imbalance = sum(busiest) / sum(map(truediv, num_tokens, self._num_experts))
        read_bytes = sum(map(mul, num_reads, self._expert_bytes))
        return ExpertLoad(sum(num_tokens), sum(num_reads), read_bytes, round(imbalance, 3))

    def reset(self) -> None:
        """Reset the totals."""
        self._totals[:] = 0
