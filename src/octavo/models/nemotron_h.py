"""Nemotron-H and Nemotron 3: layers of Mamba-2, of attention, of an MLP, or of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.experts import ExpertsConfig
from octavo.models.layer_types import FULL, LINEAR
from octavo.models.mamba2 import Mamba2Config, Mamba2Keys
from octavo.models.no_sublayer import NoSublayer
from octavo.models.plain_mlp import PlainMLPConfig
from octavo.models.routed_mlps import read_sigmoid_router, with_float_routers

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile

MODELS = {"NemotronHForCausalLM": "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super"}
_KEYS = Mamba2Keys("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "time_step_min": 0.001,
    "intermediate_size": 21504,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_PATTERN, _KINDS, _LAYERS = "hybrid_override_pattern", "layers_block_type", "num_hidden_layers"
_MLP, _MOE = "mlp", "moe"
_BY_LETTER = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`. Layers for multi-token prediction are not loaded."""
    config = config.with_defaults(**_DEFAULTS)
    config = config.with_values({"rms_norm_eps": config.number("layer_norm_epsilon")})
    config.mark("n_routed_experts")
    kinds = _read_kinds(config)
    layers = {kind: _read_layer(config, kind) for kind in dict.fromkeys(kinds)}
    max_context_tokens = config.count("max_position_embeddings")
    architecture = read_decoder(
        config, name, layers=tuple(layers[kind] for kind in kinds), max_context_tokens=max_context_tokens
    )
    return with_float_routers(architecture)


def _read_kinds(config: ConfigFile) -> list[str]:
    key = _KINDS if config.has(_KINDS) else _PATTERN
    stored = config.text(_PATTERN) if key == _PATTERN else config.values[_KINDS]
    known = _BY_LETTER if key == _PATTERN else _OLD_KINDS | {kind: kind for kind in _BY_LETTER.values()}
    for kind in stored if isinstance(stored, str | list) else ():
        if not isinstance(kind, str) or kind not in known:
            raise config.error(key, f"octavo supports {', '.join(known)}, not {kind!r}")
    kinds = [known[kind] for kind in stored] if isinstance(stored, str | list) else []
    if not kinds or (config.has(_LAYERS) and config.count(_LAYERS) != len(kinds)):
        raise config.error(key, f"must name the kind of each of {_LAYERS} layers")
    if FULL not in kinds:
        raise config.error(key, "octavo needs at least one layer of attention")
    return kinds


def _read_layer(config: ConfigFile, kind: str) -> LayerConfig:
    norms, nothing = LayerNorms(before_mlp=None), NoSublayer()
    if kind == LINEAR:
        return LayerConfig(attention=_read_mamba(config), mlp=nothing, norms=norms)
    if kind == FULL:
        head_dim = config.count("attention_head_dim", 128)  # an older name
        attention = AttentionConfig.read(config, rope=None, default_head_dim=head_dim, default_num_kv_heads=8)
        return LayerConfig(attention=attention, mlp=nothing, norms=norms)
    mlp = PlainMLPConfig.read(config) if kind == _MLP else _read_experts(config)
    return LayerConfig(attention=nothing, mlp=mlp, norms=norms)


def _read_mamba(config: ConfigFile) -> Mamba2Config:
    if config.text("mamba_hidden_act", "silu") != "silu":
        raise config.error("mamba_hidden_act", "octavo computes Mamba-2 with silu only")
    return replace(
        Mamba2Config.read(config, _KEYS),
        dt_min=config.number("time_step_min"),
        dt_max=math.inf,
        bias=config.flag("use_bias", default=False),
        conv_bias=config.flag("use_conv_bias", default=True),
    )


def _read_experts(config: ConfigFile) -> ExpertsConfig:
    mlp, latent_size = PlainMLPConfig.read(config), None
    if config.has("moe_latent_size"):
        latent_size = config.count("moe_latent_size")
    return ExpertsConfig(
        router=read_sigmoid_router(config),
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("moe_intermediate_size"),
        is_gated=False,
        shared_size=config.count("moe_shared_expert_intermediate_size"),
        shared_name="shared_experts",
        has_shared_bias=mlp.bias,
        latent_size=latent_size,
    )
