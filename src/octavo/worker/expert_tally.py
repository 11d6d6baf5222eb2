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


class ExpertTally:
    """Counts the tokens of each expert in `layers`, which may be empty.

    tokens: totals; None without layers. Recorded passes write the counts, too, because `Experts.starts` never moves.
    """

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        num_experts = [each.config.router.num_experts for each in layers]
        shape = len(layers), max(num_experts, default=0)
        self._starts = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32, device=device)
        for layer, starts, number in zip(layers, self._starts, num_experts, strict=True):
            layer.starts = starts[: number + 1]
        self._num_experts = np.array(num_experts)
        self._expert_bytes = np.array([each.bytes_per_expert for each in layers])
        self.tokens = ExpertTokens(shape[1], bytearray(8 * shape[0] * shape[1])) if layers else None
        self._totals = np.frombuffer(self.tokens.counts if self.tokens else b"", dtype=np.int64).reshape(shape)

    def begin(self) -> None:
        """Reset the step's counts, because a pass may skip the last layer."""
        self._starts.zero_()

    def take(self, copies: HostCopies) -> Tensor | None:
        """Return the step's counts as `HostCopies.to_host` does."""
        if self.tokens is None:
            return None
        return copies.to_host(self._starts.diff().clamp_(min=0))  # columns may exceed a layer's experts

    def read(self, counts: Tensor | None) -> ExpertLoad | None:
        """Add complete counts to the totals. Return None if no expert had tokens."""
        if counts is None:
            return None
        rows = counts.numpy()
        self._totals += rows
        num_tokens, num_reads = rows.sum(axis=1), (rows > 0).sum(axis=1)
        if not (total := int(num_tokens.sum())):
            return None
        imbalance = rows.max(axis=1).sum() / (num_tokens / self._num_experts).sum()
        return ExpertLoad(total, int(num_reads.sum()), int(num_reads @ self._expert_bytes), round(float(imbalance), 3))

    def reset(self) -> None:
        """Reset the totals."""
        if self.tokens is not None:
            self._totals[:] = 0
