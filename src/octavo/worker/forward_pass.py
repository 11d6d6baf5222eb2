"""A model over one KV cache: its forward pass, recorded where the kernels can, and its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.kernels.interface import AttentionBatch, DecodePlan, Kernels
    from octavo.models.layers import CausalLM
    from octavo.worker.kv_cache import PagedKVCache


class ForwardPass:
    """Computes steps of one model.

    max_tokens: rows that the recording has room for; more are computed without it. decodes: steps that become graphs.
    recorded: None until the first step, and where the kernels cannot.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        kv_cache: PagedKVCache,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.max_tokens = max_tokens
        self.recorded: Callable[[torch.Tensor, AttentionBatch], torch.Tensor] | None = None
        self._kernels = kernels
        self._decodes = decodes
        self._is_recorded = False
        self._logits = torch.empty(0)

    @property
    def has_run(self) -> bool:
        """Whether there was a step, so that nothing is recorded or captured any more."""
        return self._is_recorded

    def __call__(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return hidden states [num_outputs, hidden]; writes this step's KV. They last until the next call.

        The first step, that of the warm-up, is recorded where the kernels can.
        """
        if self.recorded is not None and token_ids.shape[0] <= self.max_tokens:
            return self.recorded(token_ids, batch)
        if self._is_recorded:
            return self._compute(token_ids, batch)
        self._is_recorded = True
        hidden, self.recorded = self._kernels.record_forward(
            self._compute, token_ids, batch, max(self.max_tokens, token_ids.shape[0]), self._decodes
        )
        return hidden

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        return self.model.forward(token_ids, batch, self.kv_cache)

    def compute_logits(self, hidden: torch.Tensor, most_rows: int) -> torch.Tensor:
        """Return float32 [rows, vocab_size], which last until the next call; most_rows: that there may ever be.

        Their memory is kept. It is too large for malloc to keep: made anew, its pages would be zeroed by the system
        each time, a tenth of a step of 64 rows.
        """
        rows, vocab_size = hidden.shape[0], self.model.lm_head.out_features
        if rows * vocab_size > self._logits.numel():
            self._logits = torch.empty(0)  # before its successor is made
            with_room = max(rows, min(2 * rows, most_rows))
            self._logits = torch.empty(with_room * vocab_size, dtype=torch.float32, device=hidden.device)
        return self.model.compute_logits(hidden, self._logits[: rows * vocab_size].view(rows, vocab_size))
