"""Computes attention whose output is multiplied by a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operations.copy_rows import copy_rows
from octavo.kernels.operations.sigmoid_gate import sigmoid_gate
from octavo.models.attention import Attention

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch


class GatedAttention(Attention):
    """One layer's gated attention."""

    __slots__ = ()

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Write keys and values. Return queries, then gates [num_tokens, 2 * num_heads, head_dim]."""
        config, kernels, (k_cache, v_cache) = self.config, self.kernels, cache
        num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = kernels.linear(hidden, self.qkv)
        heads = qkv.view(len(qkv), 2 * (num_heads + num_kv_heads), size)
        q, gate, k, v = heads.split_with_sizes((num_heads, num_heads, num_kv_heads, num_kv_heads), dim=1)
        q = kernels.rope_and_write_kv(
            q, k, v, self.cos_sin, batch, k_cache, v_cache, q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps
        )
        result = kernels.empty(len(qkv), 2 * num_heads, size, like=qkv)
        for part, source in zip(result.split_with_sizes((num_heads, num_heads), dim=1), (q, gate), strict=True):
            copy_rows(kernels, source, part)
        return result

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`. q: from `write_kv`."""
        config, (k_cache, v_cache) = self.config, cache
        queries, gate = q.split_with_sizes((config.num_heads, config.num_heads), dim=1)
        attended = self.kernels.paged_attention(queries, k_cache, v_cache, batch, self.scale, config.window)
        sigmoid_gate(self.kernels, attended.view(len(q), config.num_heads, config.head_dim), gate)
        return self.kernels.linear(attended, self.o)
