"""LFM2: gated short convolutions in most layers, attention with norms of q and k in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import SIGMOID, ExpertsConfig, Router
from octavo.models.gated_conv import GatedConvConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import FULL
from octavo.models.rope_config import read_rope
from octavo.models.routed_mlps import with_float_routers

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLPConfig

MODELS = {"Lfm2ForCausalLM": "LFM2, LFM2.5", "Lfm2MoeForCausalLM": "LFM2-8B-A1B, LFM2-24B-A2B"}
_MOE, _CONV = "Lfm2MoeForCausalLM", "conv"
_LEAST_SUM = 1e-6  # as in transformers


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    tied = config.flag("tie_embedding", default=config.flag("tie_word_embeddings", default=True))
    config = config.with_values({"rms_norm_eps": config.number("norm_eps", 1e-5), "tie_word_embeddings": tied})
    config = config.with_defaults(max_position_embeddings=128_000, rope_theta=1e6)
    max_positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_positions)
    attention = AttentionConfig.read(config, rope=rope, default_num_kv_heads=8, qk_norm="head")
    conv, kinds = GatedConvConfig.read(config), _read_kinds(config)
    mlps = _read_experts(config) if name == _MOE else (_read_mlp(config),) * len(kinds)
    layers = tuple(
        LayerConfig(attention=attention if kind == FULL else conv, mlp=mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    )
    max_context_tokens = rope.max_context_tokens(max_positions)
    return with_float_routers(read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens))


def _read_kinds(config: ConfigFile) -> list[str]:
    num_layers, key = config.count("num_hidden_layers"), "layer_types"
    if config.has(key):
        kinds = config.values[key]
    else:
        full = config.whole_numbers("full_attn_idxs", list(range(num_layers)))
        kinds = [FULL if index in full else _CONV for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error(key, f"must list num_hidden_layers = {num_layers} entries")
    for kind in kinds:
        if kind not in {FULL, _CONV}:
            raise config.error(key, f"octavo supports {FULL} and {_CONV} in this family, not {kind!r}")
    if FULL not in kinds:
        raise config.error(key, f"octavo needs at least one layer with {FULL}")
    return kinds


def _read_mlp(config: ConfigFile) -> GatedMLPConfig:
    size = config.count("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return GatedMLPConfig(intermediate_size=size)
    multiple = config.count("block_multiple_of", 256)
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return GatedMLPConfig(intermediate_size=-(-size // multiple) * multiple)


def _read_experts(config: ConfigFile) -> tuple[MLPConfig, ...]:
    num_layers = config.count("num_hidden_layers")
    router = replace(
        Router.read(config, normalizes=False),
        scoring=SIGMOID,
        least_sum=_LEAST_SUM if config.flag("norm_topk_prob", default=True) else -1.0,
        scale=config.number("routed_scaling_factor", 1.0),
        has_choice_bias=config.flag("use_expert_bias", default=True),
    )
    experts = ExpertsConfig(
        router=router, hidden_size=config.count("hidden_size"), expert_size=config.count("moe_intermediate_size")
    )
    dense = GatedMLPConfig(intermediate_size=config.count("intermediate_size"))
    num_dense = config.with_defaults(num_dense_layers=2).whole_number("num_dense_layers", num_layers)
    return (dense,) * num_dense + (experts,) * (num_layers - num_dense)
