"""Computes multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operations.rope_and_write_latents import rope_and_write_latents

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.latent_attention import LatentAttentionConfig, LatentAttentionTensors
    from octavo.models.layers import ModelContext

_NORM_EPS = 1e-6  # of the norms of latents, as in transformers; rms_norm_eps has no effect


class LatentAttention:
    """The latent attention of one layer."""

    __slots__ = (
        "config", "cos_sin", "down", "k_b", "kernels", "kv_norm", "o", "q_b", "q_norm", "query_scale", "v_b",
    )  # fmt: skip

    def __init__(self, context: ModelContext, config: LatentAttentionConfig, tensors: LatentAttentionTensors) -> None:
        self.config, self.kernels = config, context.kernels
        self.cos_sin = context.cos_sin(config.rope, config.rope_dim)
        self.query_scale: Tensor | None = None
        self.down = context.linear(tensors.down)
        self.q_norm = context.optional_norm(tensors.q_norm)
        self.q_b = None if tensors.q_b is None else context.linear(tensors.q_b)
        self.kv_norm = context.norm(tensors.kv_norm)
        self.k_b, self.v_b = context.grouped(tensors.k_b), context.grouped(tensors.v_b)
        self.o = context.linear(tensors.o)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Write this step's latents. Return the queries [num_tokens, num_heads, kv_rank + rope_dim]."""
        config, kernels, (latents,) = self.config, self.kernels, cache
        down = kernels.linear(hidden, self.down)
        q, latent = down.split_with_sizes((down.shape[1] - config.head_dim, config.head_dim), dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = kernels.rms_norm(q.unsqueeze(1), self.q_norm, _NORM_EPS)
            q = kernels.linear(q.view(len(hidden), -1), self.q_b)
        heads = q.view(len(hidden), config.num_heads, config.nope_dim + config.rope_dim)
        plain, rotated = heads.split_with_sizes((config.nope_dim, config.rope_dim), dim=2)
        queries = kernels.empty(len(hidden), config.num_heads, config.head_dim, like=down)
        kernels.head_linear(plain, self.k_b, queries.split_with_sizes((config.kv_rank, config.rope_dim), dim=2)[0])
        rope_and_write_latents(
            kernels, rotated, latent, self.kv_norm, _NORM_EPS, self.cos_sin, config.rope.interleaved, batch.positions,
            batch.slot_mapping, latents, queries,
        )  # fmt: skip
        return queries

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`."""
        config, kernels, (latents,) = self.config, self.kernels, cache
        values = latents.split_with_sizes((config.kv_rank, config.rope_dim), dim=3)[0]
        attended = kernels.paged_attention(q, latents, values, batch, config.scale, None)
        heads = kernels.head_linear(attended.view(len(q), config.num_heads, config.kv_rank), self.v_b)
        return kernels.linear(heads.view(len(q), -1), self.o)
