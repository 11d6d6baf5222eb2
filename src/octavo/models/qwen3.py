"""Qwen3: an RMS norm on each head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.qwen2 import layers_with_windows
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile


MODELS = {"Qwen3ForCausalLM": "Qwen3"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    attention, max_context_tokens = read_attention(config)
    layers = layers_with_windows(config, attention)
    return read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens)


def read_attention(config: ConfigFile) -> tuple[AttentionConfig, int]:
    """Return attention without a window, and the longest context."""
    max_positions = config.count("max_position_embeddings", 32768)
    rope, bias = read_rope(config, max_positions), config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(
        config,
        rope=rope,
        default_head_dim=128,
        default_num_kv_heads=32,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
    )
    return attention, rope.max_context_tokens(max_positions)
