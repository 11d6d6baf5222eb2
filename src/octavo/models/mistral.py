"""Mistral: Llama without biases. Early checkpoints have sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"MistralForCausalLM": "Mistral 7B, Mistral NeMo, Mistral Small"}
_DEFAULT_WINDOW = 4096  # null means no window


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions, num_layers = config.count("max_position_embeddings", 131072), config.count("num_hidden_layers")
    has_window = config.values.get("sliding_window", _DEFAULT_WINDOW) is not None
    window = config.count("sliding_window", _DEFAULT_WINDOW) if has_window else None
    kind = "sliding_attention" if has_window else "full_attention"
    if config.values.get("layer_types") not in (None, [kind] * num_layers):
        raise config.error("layer_types", f"octavo supports Mistral with {kind} in every layer of this checkpoint")
    rope = read_rope(config, max_positions)
    attention = AttentionConfig.read(config, rope=rope, default_num_kv_heads=8)
    layer = LayerConfig(attention=replace(attention, window=window), mlp=GatedMLPConfig.read(config))
    return read_decoder(
        config, name, layers=(layer,) * num_layers, max_context_tokens=rope.max_context_tokens(max_positions)
    )
