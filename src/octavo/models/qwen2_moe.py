"""Qwen2's mixtures of experts. The shared expert has a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.experts import ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.qwen2 import layers_with_windows
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import LayerConfig

MODELS = {"Qwen2MoeForCausalLM": "Qwen1.5 MoE, Qwen2 MoE"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions = config.count("max_position_embeddings", 32768)
    rope = read_rope(config, max_positions)
    bias = config.flag("qkv_bias", default=True)
    attention = AttentionConfig.read(config, rope=rope, default_num_kv_heads=16, qkv_bias=bias)
    shared_size = config.count("shared_expert_intermediate_size", 5632)
    windows = layers_with_windows(config, attention, lambda index, bound: index % 2 == 0 and index < bound)
    layers = with_experts(config, windows, shared_size=shared_size)
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))


def with_experts(
    config: ConfigFile, layers: tuple[LayerConfig, ...], shared_size: int | None = None
) -> tuple[LayerConfig, ...]:
    """Give experts to each `decoder_sparse_step`-th layer, except `mlp_only_layers`."""
    step, dense = config.count("decoder_sparse_step", 1), config.whole_numbers("mlp_only_layers", [])
    router = Router.read(config, normalizes=config.flag("norm_topk_prob", default=False))
    experts = ExpertsConfig(
        router=router,
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("moe_intermediate_size"),
        activation=GatedMLPConfig.read(config).activation,
        shared_size=shared_size,
        has_shared_gate=shared_size is not None,
    )
    return tuple(
        layer if index in dense or (index + 1) % step else replace(layer, mlp=experts)
        for index, layer in enumerate(layers)
    )
