"""Runs forward passes of one model."""

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

    max_tokens: maximum rows of replayed steps. recorded: replays steps; None before the first step, or if kernels
    cannot record.
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
        """True after the first step."""
        return self._is_recorded

    def __call__(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Write KV and return hidden states [num_outputs, hidden], valid until the next call."""
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
        """Return float32 [rows, vocab_size], valid until the next call.

        most_rows: the most rows of any call; limits the buffer's growth.
        """
        rows, vocab_size = hidden.shape[0], self.model.lm_head.out_features
        if rows * vocab_size > self._logits.numel():
            self._logits = torch.empty(0)
            with_room = max(rows, min(2 * rows, most_rows))
            self._logits = torch.empty(with_room * vocab_size, dtype=torch.float32, device=hidden.device)
        return self.model.compute_logits(hidden, self._logits[: rows * vocab_size].view(rows, vocab_size))
