"""Gemma: Llama with a GELU gate, scaled embeddings, and norms stored as weight minus 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"GemmaForCausalLM": "Gemma"}
GELU = "gelu_pytorch_tanh"


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Gemma's keys. Early files write `hidden_act` "gelu" but mean GELU by tanh."""
    config = config.with_defaults(hidden_act=GELU, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192)
    if config.text("hidden_act") not in {GELU, "gelu"}:
        raise config.error("hidden_act", f"octavo computes {GELU} only")
    max_positions, bias = config.count("max_position_embeddings"), config.flag("attention_bias", default=False)
    rope = read_rope(config, max_positions)
    layer = LayerConfig(
        attention=AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias),
        mlp=GatedMLPConfig(intermediate_size=config.count("intermediate_size"), activation="gelu_tanh"),
    )
    layers = (layer,) * config.count("num_hidden_layers")
    return read_gemma(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))


def read_gemma(
    config: ConfigFile,
    name: str,
    *,
    layers: tuple[LayerConfig, ...],
    max_context_tokens: int,
    norm_offset: float = 1.0,
) -> Architecture:
    """Read all Gemma generations' keys."""
    config = config.with_defaults(tie_word_embeddings=True)
    architecture = read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens)
    return replace(architecture, embedding_scale=math.sqrt(architecture.hidden_size), norm_offset=norm_offset)
