"""Counts the tokens of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.expert_stats import ExpertLoad, ExpertTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.models.expert_layer import Experts
    from octavo.worker.host_copies import HostCopies

_ALIGNMENT = 4  # numbers; Triton compiles again for other alignments


class ExpertTally:
    """Counts tokens by layer and expert.

    tokens: totals; None without layers. Recorded passes write `Experts.starts`, too, because it never moves. Padding
    rows of decode graphs count.
    """

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        numbers = [each.config.router.num_experts for each in layers]
        shape = len(layers), max(numbers, default=0)
        starts = torch.zeros(shape[0], -(-(shape[1] + 1) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.int32, device=device)
        for layer, number, row in zip(layers, numbers, starts, strict=True):
            layer.starts = row[len(row) - number - 1 :]  # after zeros, if shorter
        self._starts = starts[:, starts.shape[1] - shape[1] - 1 :]
        self._shares = 1 / np.array(numbers)
        self._expert_bytes = np.array([each.bytes_per_expert for each in layers])
        self.tokens = ExpertTokens(shape[1], bytearray(8 * shape[0] * shape[1])) if layers else None
        self._totals = np.frombuffer(self.tokens.counts if self.tokens else b"", dtype=np.int64).reshape(shape)

    def begin(self, num_outputs: int) -> None:
        """Begin a step. Without outputs it skips the last layer."""
        if not num_outputs:
            self._starts.zero_()

    def take(self, copies: HostCopies) -> Tensor | None:
        """Return a step's counts; see `HostCopies.to_host`."""
        return None if self.tokens is None else copies.to_host(self._starts.diff())

    def read(self, counts: Tensor | None) -> ExpertLoad | None:
        """Add counts to the totals. Return None without tokens."""
        if counts is None:
            return None
        rows = counts.numpy()
        self._totals += rows
        num_tokens, num_reads = np.add.reduce(rows, axis=1), np.add.reduce(rows > 0, axis=1)
        if not (total := sum(num_tokens.tolist())):
            return None
        imbalance = sum(np.maximum.reduce(rows, axis=1).tolist()) / float(num_tokens @ self._shares)
        read_bytes = int(num_reads @ self._expert_bytes)
        return ExpertLoad(total, sum(num_reads.tolist()), read_bytes, round(imbalance, 3))

    def reset(self) -> None:
        """Reset the totals."""
        if self.tokens is not None:
            self._totals[:] = 0
