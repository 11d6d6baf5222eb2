"""Qwen3.5, 3.6 and 3.8: gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_attention import GatedAttentionConfig
from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import FULL, LINEAR, read_hybrid_types
from octavo.models.qwen2_moe import with_experts
from octavo.models.rope_config import read_rope
from octavo.models.text_part import without_mrope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"Qwen3_5ForCausalLM": "Qwen3.5, Qwen3.6, Qwen3.8"}
_PARTIAL, _ROPES = "partial_rotary_factor", ("rope_parameters", "rope_scaling")


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`. Layers for multi-token prediction are not loaded."""
    return read_hybrid(config, name, GatedDeltaConfig.read(config))


def read_hybrid(
    config: ConfigFile, name: str, delta: GatedDeltaConfig, *, shared_size: int | None = None
) -> Architecture:
    """Read a model with gated delta nets. shared_size: see `with_experts`. None means layers with plain MLPs."""
    config.mark("mtp_num_hidden_layers")
    attention, max_context_tokens = _read_attention(config)
    mlp, kinds = GatedMLPConfig.read(config), _read_kinds(config)
    layers = tuple(LayerConfig(attention=attention if kind == FULL else delta, mlp=mlp) for kind in kinds)
    if shared_size is not None:
        layers = with_experts(config, layers, shared_size)
    architecture = read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens)
    return replace(architecture, norm_offset=1.0)


def _read_attention(config: ConfigFile) -> tuple[GatedAttentionConfig, int]:
    max_positions = config.count("max_position_embeddings", 32768)
    ropes = {key: without_mrope(each) for key in _ROPES if isinstance(each := config.values.get(key), dict)}
    config = config.with_values(ropes)
    section = config.section("rope_parameters") or config.section("rope_scaling")
    if section is None or not section.has(_PARTIAL):
        config = config.with_defaults(**{_PARTIAL: 0.25})
    rope, bias = read_rope(config, max_positions, is_partial=True), config.flag("attention_bias", default=False)
    plain = AttentionConfig.read(
        config, rope=rope, default_head_dim=256, default_num_kv_heads=4, qkv_bias=bias, o_bias=bias, qk_norm="head"
    )
    return GatedAttentionConfig.of(plain), rope.max_context_tokens(max_positions)


def _read_kinds(config: ConfigFile) -> list[str]:
    num_layers, interval = config.count("num_hidden_layers"), config.count("full_attention_interval", 4)
    kinds = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    return read_hybrid_types(config.with_defaults(layer_types=kinds))
