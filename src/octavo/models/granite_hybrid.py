"""Granite 4: Mamba-2 in most layers, attention in some, and a shared MLP, often with experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.granite import read_experts, read_scaled
from octavo.models.layer_types import FULL, LINEAR, read_hybrid_types
from octavo.models.mamba2 import Mamba2Config, Mamba2Keys
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLPConfig, TokenMixerConfig

MODELS = {"GraniteMoeHybridForCausalLM": "Granite 4, with Mamba-2 (H) and without"}
_KEYS = Mamba2Keys("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
_LIMITS, _POSITIONS, _MOST_EXPERTS = "time_step_limit", "position_embedding_type", 2**16


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    attention, max_context_tokens = _read_attention(config)
    kinds = read_hybrid_types(config, old_names=_OLD_KINDS)
    mlp = _read_mlp(config)
    mixers: dict[str, TokenMixerConfig] = {FULL: attention}
    if LINEAR in kinds:
        mixers[LINEAR] = _read_mamba(config)
    layers = tuple(LayerConfig(attention=mixers[kind], mlp=mlp) for kind in kinds)
    return read_scaled(config, name, layers, max_context_tokens)


def _read_attention(config: ConfigFile) -> tuple[AttentionConfig, int]:
    max_context_tokens, rope = config.count("max_position_embeddings", 2048), None
    match config.text(_POSITIONS, "nope"):
        case "rope":
            rope = read_rope(config, max_context_tokens)
            max_context_tokens = rope.max_context_tokens(max_context_tokens)
        case "nope":
            pass
        case _:
            raise config.error(_POSITIONS, "octavo supports rope and nope")
    bias = config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias)
    return replace(attention, scale=config.number("attention_multiplier", 1.0)), max_context_tokens


def _read_mlp(config: ConfigFile) -> MLPConfig:
    is_fused, size = config.flag("mlp_is_fused", default=True), config.count("shared_intermediate_size")
    if not config.whole_number("num_local_experts", _MOST_EXPERTS):
        return replace(GatedMLPConfig.read(config, is_fused=is_fused), intermediate_size=size)
    return replace(read_experts(config), shared_size=size, shared_name="", is_shared_fused=is_fused)


def _read_mamba(config: ConfigFile) -> Mamba2Config:
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "octavo computes Mamba-2 with silu only")
    if config.values["mamba_d_head"] == "auto":
        inner = config.count("mamba_expand", 2) * config.count("hidden_size")
        config = config.with_values({"mamba_d_head": inner / config.count("mamba_n_heads")})
    dt_min, dt_max = _read_limits(config)
    return replace(
        Mamba2Config.read(config, _KEYS),
        dt_min=dt_min,
        dt_max=dt_max,
        bias=config.flag("mamba_proj_bias", default=False),
        conv_bias=config.flag("mamba_conv_bias", default=True),
    )


def _read_limits(config: ConfigFile) -> tuple[float, float]:
    if not config.has(_LIMITS):
        return 0.0, math.inf
    stored = config.values[_LIMITS]
    limits = [_number(each) for each in stored] if isinstance(stored, list) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:  # False for NaN, too
        raise config.error(_LIMITS, "must be two ascending numbers of at least 0")
    return limits[0], limits[1]


def _number(stored: object) -> float:
    """Read a number. In config.json of transformers 5, infinity is {"__float__": "Infinity"}."""
    if isinstance(stored, dict):
        stored = math.inf if stored.get("__float__") == "Infinity" else None
    return float(stored) if isinstance(stored, int | float) and not isinstance(stored, bool) else math.nan
