"""Counts the tokens of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.data.expert_stats import ExpertLoad, ExpertTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.models.expert_layer import Experts
    from octavo.worker.host_copies import HostCopies


class ExpertTally(Protocol):
    """Counts the tokens that each step gave to each expert. tokens: totals, or None without experts."""

    tokens: ExpertTokens | None

    def begin(self) -> None:
        """Reset the counts of the step. Call it before the forward pass."""
        ...

    def take(self, copies: HostCopies) -> Tensor | None:
        """Return the counts after the forward pass, complete as in `HostCopies.to_host`."""
        ...

    def read(self, counts: Tensor | None) -> ExpertLoad | None:
        """Add complete counts to the totals. Return their figures, or None if no expert had tokens."""
        ...

    def reset(self) -> None:
        """Set the totals to 0."""
        ...


class NoExpertTally:
    """The tally of models without experts."""

    tokens = None

    def begin(self) -> None:
        """Do nothing."""

    def take(self, copies: HostCopies) -> None:
        """Return None."""

    def read(self, counts: Tensor | None) -> None:
        """Return None."""

    def reset(self) -> None:
        """Do nothing."""


class LayerTally:
    """Reads `Experts.starts`, which it places in one tensor. So recorded passes write the counts, too."""

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        num_experts = [each.config.router.num_experts for each in layers]
        shape = len(layers), max(num_experts)
        self._starts = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32, device=device)
        for layer, starts, number in zip(layers, self._starts, num_experts, strict=True):
            layer.starts = starts[: number + 1]
        self._num_experts = np.array(num_experts)
        self._expert_bytes = np.array([each.bytes_per_expert for each in layers])
        self.tokens = ExpertTokens(shape[1], bytearray(8 * shape[0] * shape[1]))
        self._totals = np.frombuffer(self.tokens.counts, dtype=np.int64).reshape(shape)

    def begin(self) -> None:
        """See `ExpertTally`. A pass skips the last layer if no row needs an output."""
        self._starts.zero_()

    def take(self, copies: HostCopies) -> Tensor:
        """See `ExpertTally`."""
        return copies.to_host(self._starts.diff().clamp_(min=0))  # layers may have fewer experts than columns

    def read(self, counts: Tensor | None) -> ExpertLoad | None:
        """See `ExpertTally`."""
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
        """See `ExpertTally`."""
        self._totals[:] = 0


def create_expert_tally(layers: Sequence[Experts], device: torch.device) -> ExpertTally:
    """Return the tally of a model's layers with experts."""
    return LayerTally(layers, device) if layers else NoExpertTally()
