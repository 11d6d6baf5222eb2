"""Granite 3: Llama, or Mixtral, with constant factors for embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import SOFTMAX_OF_CHOSEN, ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLPConfig


MODELS = {"GraniteForCausalLM": "Granite 3", "GraniteMoeForCausalLM": "Granite 3 MoE (1B-A400M, 3B-A800M)"}
_WITH_EXPERTS = "GraniteMoeForCausalLM"


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions = config.count("max_position_embeddings", 2048)
    rope, bias = read_rope(config, max_positions), config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias)
    mlp: MLPConfig = GatedMLPConfig.read(config, bias=config.flag("mlp_bias", default=False))
    if name == _WITH_EXPERTS:
        mlp = read_experts(config)
    attention = replace(attention, scale=config.number("attention_multiplier", 1.0))
    layers = (LayerConfig(attention=attention, mlp=mlp),) * config.count("num_hidden_layers")
    return read_scaled(config, name, layers, rope.max_context_tokens(max_positions))


def read_scaled(
    config: ConfigFile, name: str, layers: tuple[LayerConfig, ...], max_context_tokens: int
) -> Architecture:
    """Read the factors of embeddings, residuals and logits, and all families' keys."""
    scale = config.number("residual_multiplier", 1.0)
    layers = tuple(replace(layer, residual_scale=scale) for layer in layers)
    return replace(
        read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logits_scaling=config.number("logits_scaling", 1.0),
    )


def read_experts(config: ConfigFile) -> ExpertsConfig:
    """`intermediate_size` is one expert's."""
    dense = GatedMLPConfig.read(config)
    return ExpertsConfig(
        router=replace(Router.read(config, normalizes=True), scoring=SOFTMAX_OF_CHOSEN),
        hidden_size=config.count("hidden_size"),
        expert_size=dense.intermediate_size,
        activation=dense.activation,
        router_name="router",
    )
