"""Llama 2 and 3.x: the plain decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile


MODELS = {"LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2 and 3.3, SmolLM2, TinyLlama"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Llama's keys. `sliding_window` has no effect."""
    max_positions = config.count("max_position_embeddings", 2048)
    rope, bias = read_rope(config, max_positions), config.flag("attention_bias", default=False)
    layer = LayerConfig(
        attention=AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias),
        mlp=GatedMLPConfig.read(config, bias=config.flag("mlp_bias", default=False)),
    )
    return read_decoder(
        config,
        name,
        layers=(layer,) * config.count("num_hidden_layers"),
        max_context_tokens=rope.max_context_tokens(max_positions),
    )
