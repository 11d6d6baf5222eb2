"""A model over one KV cache: its forward pass, recorded if the kernels can, and its logits."""

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

    max_tokens: rows that the recording has room for; larger steps run without it. decodes: steps that are captured as
    graphs. recorded: None until the first step, and if the kernels cannot record.
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
        """True if there was a step, so that nothing is recorded or captured any more."""
        return self._is_recorded

    def __call__(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return hidden states [num_outputs, hidden], valid until the next call; writes this step's KV.

        The first step, that of the warm-up, is recorded if the kernels can.
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
        """Return float32 [rows, vocab_size], valid until the next call. most_rows: the most rows of any call.

        Their memory is kept, because malloc would not keep so large a piece. If it were allocated anew, the system
        would zero its pages each time, which takes a tenth of a step of 64 rows.
        """
        rows, vocab_size = hidden.shape[0], self.model.lm_head.out_features
        if rows * vocab_size > self._logits.numel():
            self._logits = torch.empty(0)  # free it before its successor is allocated
            with_room = max(rows, min(2 * rows, most_rows))
            self._logits = torch.empty(with_room * vocab_size, dtype=torch.float32, device=hidden.device)
        return self.model.compute_logits(hidden, self._logits[: rows * vocab_size].view(rows, vocab_size))
