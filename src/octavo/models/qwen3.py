"""Qwen3: heads of their own width (head_dim), and an RMS norm on each head of q and k before they are rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.layers import Attention, CausalLM
from octavo.models.qwen2 import read_windows

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Qwen3's keys."""
    bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        name,
        sliding_window=read_windows(config),
        default_head_dim=128,
        default_num_kv_heads=32,
        default_max_position_embeddings=32768,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def build(context: ModelContext) -> CausalLM:
    """Pack the weights into a model."""
    return CausalLM(context, NormedAttention)


class NormedAttention(Attention):
    """Attention whose queries and keys are normalized, one weight of [head_dim] for all heads."""

    __slots__ = ("k_norm", "q_norm")

    def __init__(self, context: ModelContext, layer: int) -> None:
        super().__init__(context, layer)
        self.q_norm = context.weights.norm(f"model.layers.{layer}.self_attn.q_norm.weight")
        self.k_norm = context.weights.norm(f"model.layers.{layer}.self_attn.k_norm.weight")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize [num_tokens, num_heads, head_dim] per head."""
        return self.kernels.rms_norm(q, self.q_norm, self.eps), self.kernels.rms_norm(k, self.k_norm, self.eps)
