"""Gemma 4 (text): two head sizes, normalized values, and optionally experts, shared KV and per-layer embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.attention import AttentionConfig
from octavo.models.config_file import ConfigFile
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.experts import BranchNorms, ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.gemma import GELU, read_gemma
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.per_layer_embeddings import PerLayerEmbeddings
from octavo.models.rope_config import RopeConfig, read_rope
from octavo.models.routed_mlps import with_float_routers

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.decoder_layer import MLPConfig

MODELS = {
    "Gemma4ForCausalLM": "Gemma 4 E2B, E4B, 26B-A4B and 31B",
    "Gemma4UnifiedForCausalLM": "Gemma 4 12B",
}
_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "vocab_size_per_layer_input": 262_144,
}
_UNIFIED_DEFAULTS = {"sliding_window": 1024, "max_position_embeddings": 262_144}
_PER_LAYER_WIDTH = "hidden_size_per_layer_input"
_PATTERN, _PARTIAL = 6, 0.25
_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_BRANCHES = BranchNorms(
    before_shared="pre_feedforward_layernorm",
    after_shared="post_feedforward_layernorm_1",
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
)


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Gemma 4's keys. The last layer always has full attention, as in transformers."""
    if name == "Gemma4UnifiedForCausalLM":
        config = config.with_defaults(**_UNIFIED_DEFAULTS)
    elif _PER_LAYER_WIDTH not in config.values:
        config = config.with_defaults(**{_PER_LAYER_WIDTH: 256})
    config = config.with_defaults(**_DEFAULTS)
    config.mark("use_bidirectional_attention")
    if config.values.get("use_bidirectional_attention") not in {None, False, "vision"}:
        raise config.error("use_bidirectional_attention", "octavo computes causal attention of text only")
    kinds = [*read_layer_types(config, pattern=_PATTERN)[:-1], FULL]
    mlp = GatedMLPConfig.read(config, activation_key="hidden_activation", default_activation=GELU)
    embeddings = _read_embeddings(config, mlp)
    num_own = len(kinds) - config.whole_number("num_kv_shared_layers", len(kinds) - 1)
    is_wide = config.flag("use_double_wide_mlp", default=False)
    mlps: list[MLPConfig] = [
        replace(mlp, intermediate_size=mlp.intermediate_size * (2 if is_wide and index >= num_own else 1))
        for index in range(len(kinds))
    ]
    norms = _NORMS
    if config.flag("enable_moe_block", default=False):
        mlps = [_read_experts(config, each) for each in mlps if isinstance(each, GatedMLPConfig)]
        norms = replace(norms, before_mlp=None)
    config.mark("num_experts")
    layers = tuple(
        LayerConfig(attention=attention, mlp=mlp, norms=norms, embeddings=embeddings, stream_scale=True)
        for attention, mlp in zip(_read_attentions(config, kinds, num_own), mlps, strict=True)
    )
    max_positions = config.count("max_position_embeddings")
    architecture = read_gemma(config, name, layers=layers, max_context_tokens=max_positions, norm_offset=0.0)
    architecture = replace(architecture, logit_softcap=config.optional_number("final_logit_softcapping"))
    return with_float_routers(architecture)


def _read_attentions(config: ConfigFile, kinds: list[str], num_own: int) -> list[AttentionConfig]:
    """Layers from `num_own` on share KV with the last earlier layer of their kind."""
    ropes = _read_ropes(config)
    k_eq_v, window = config.flag("attention_k_eq_v", default=False), config.count("sliding_window")
    attentions: list[AttentionConfig] = []
    for index, kind in enumerate(kinds):
        if index < num_own:
            attention = _read_heads(config, index, kind, ropes[kind], k_eq_v=k_eq_v)
            attention = replace(attention, values_are_keys=k_eq_v and kind == FULL, scale=1.0, v_norm=True)
            attentions.append(replace(attention, window=window if kind == SLIDING else None))
            continue
        shared = max((own for own in range(num_own) if kinds[own] == kind), default=None)
        if shared is None:
            raise config.error("num_kv_shared_layers", f"no layer of its own has the keys of layer {index} ({kind})")
        attentions.append(replace(attentions[shared], shared_layer=shared))
    return attentions


def _read_heads(config: ConfigFile, index: int, kind: str, rope: RopeConfig, *, k_eq_v: bool) -> AttentionConfig:
    head_dim_key, kv_heads_key = "head_dim", "num_key_value_heads"
    if (per_layer := config.section("per_layer_config")) is not None:
        config.mark("per_layer_config")
        if (own := per_layer.section(str(index))) is not None:
            if unknown := own.values.keys() - {head_dim_key, kv_heads_key}:
                raise own.error(min(unknown), f"octavo reads {head_dim_key} and {kv_heads_key} of a layer")
            config = ConfigFile(config.path, config.values | own.values, own.prefix)
    elif kind == FULL:
        head_dim_key = "global_head_dim"
        if k_eq_v and config.has("num_global_key_value_heads"):
            kv_heads_key = "num_global_key_value_heads"
    bias = config.flag("attention_bias", default=False)
    return AttentionConfig.read(
        config, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="head", head_dim_key=head_dim_key,
        kv_heads_key=kv_heads_key,
    )  # fmt: skip


def _read_ropes(config: ConfigFile) -> dict[str, RopeConfig]:
    kinds = config.section("rope_parameters") or ConfigFile(config.path, {}, f"{config.prefix}rope_parameters.")
    full = kinds.section(FULL) or ConfigFile(
        config.path,
        {"rope_type": "proportional", "partial_rotary_factor": _PARTIAL, "rope_theta": 1e6},
        f"{kinds.prefix}{FULL}.",
    )
    sliding = kinds.section(SLIDING) or ConfigFile(config.path, {"rope_theta": 1e4}, f"{kinds.prefix}{SLIDING}.")
    max_positions = config.count("max_position_embeddings")
    return {
        FULL: read_rope(config, max_positions, section=full, is_partial=full.values.get("rope_type") == "proportional"),
        SLIDING: read_rope(config, max_positions, section=sliding),
    }


def _read_embeddings(config: ConfigFile, mlp: GatedMLPConfig) -> PerLayerEmbeddings | None:
    if not config.values.get(_PER_LAYER_WIDTH):
        return None
    num_rows = config.count("vocab_size_per_layer_input")
    if num_rows < config.count("vocab_size"):
        raise config.error("vocab_size_per_layer_input", f"must be at least vocab_size = {config.count('vocab_size')}")
    return PerLayerEmbeddings(
        num_layers=config.count("num_hidden_layers"),
        num_rows=num_rows,
        width=config.count(_PER_LAYER_WIDTH),
        activation=mlp.activation,
    )


def _read_experts(config: ConfigFile, mlp: GatedMLPConfig) -> ExpertsConfig:
    router = Router.read(config, normalizes=True, num_chosen_key="top_k_experts")
    return ExpertsConfig(
        router=replace(router, has_expert_scale=True),
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("moe_intermediate_size"),
        activation=mlp.activation,
        shared_size=mlp.intermediate_size,
        router_name="router",
        shared_name="",
        branches=_BRANCHES,
    )
