"""Log probabilities."""

from __future__ import annotations

import torch

from octavo.kernels.operation import Operation


@Operation
def log_softmax(logits: torch.Tensor) -> None:
    """Replace float32 logits [rows, vocab], contiguous, by log probabilities. A row with a NaN becomes NaN."""
    logits.copy_(torch.log_softmax(logits, dim=-1))
