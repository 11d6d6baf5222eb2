"""DeepSeek V2 and V3, and models with the same layers: latent attention, and experts next to shared experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import SIGMOID, ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLPConfig

MODELS = {
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2-Lite and Coder-V2",
    "DeepseekV3ForCausalLM": "DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
}
_V2 = "DeepseekV2ForCausalLM"
_NUM_DENSE = {_V2: 0, "DeepseekV3ForCausalLM": 3, "Glm4MoeLiteForCausalLM": 1}  # as in transformers
_NEVER_FP8 = ("mlp.gate", "lm_head")  # published checkpoints do not list them
_DENSE, _SPARSE = "dense", "sparse"
_LEAST_SUM = 1e-20  # as in transformers


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_positions)
    interleaved = name == _V2 or config.flag("rope_interleave", default=True)
    rope = replace(rope, interleaved=interleaved)
    attention = LatentAttentionConfig.read(config, rope=rope, scale=_score_factor(config))
    bias = name == _V2 and config.flag("mlp_bias", default=False)
    mlp = GatedMLPConfig.read(config, bias=bias)
    experts = ExpertsConfig(
        router=_read_router(config, name),
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("moe_intermediate_size"),
        activation=mlp.activation,
        shared_size=_shared_size(config),
        shared_name="shared_experts",
        has_shared_bias=bias,
    )
    mlps: dict[str, MLPConfig] = {_DENSE: mlp, _SPARSE: experts}
    layers = tuple(LayerConfig(attention=attention, mlp=mlps[kind]) for kind in _mlp_kinds(config, _NUM_DENSE[name]))
    max_context_tokens = rope.max_context_tokens(max_positions)
    architecture = read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens)
    floats = architecture.stored_floats
    if floats is None:
        return architecture
    return replace(architecture, stored_floats=replace(floats, ignored=(*floats.ignored, *_NEVER_FP8)))


def _score_factor(config: ConfigFile) -> float:
    """Return yarn's factor of attention scores, or 1."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is None or section.text("rope_type" if section.has("rope_type") else "type", "default") != "yarn":
        return 1.0
    if not section.values.get("mscale_all_dim"):  # zero counts as missing, as in transformers
        return 1.0
    factor = section.number("factor")
    mscale = 1.0 if factor <= 1.0 else 0.1 * section.number("mscale_all_dim") * math.log(factor) + 1.0
    return mscale * mscale


def _read_router(config: ConfigFile, name: str) -> Router:
    """Read V2's router, or V3's, which adds a bias for the choice of experts."""
    router = Router.read(config, normalizes=False)
    if name != _V2:
        _require(config, "scoring_func", "sigmoid")
        _require(config, "topk_method", "noaux_tc")
        normalizes = config.flag("norm_topk_prob", default=True)
        least_sum = _LEAST_SUM if normalizes else -1.0
        return replace(router.in_groups(config), scoring=SIGMOID, least_sum=least_sum, has_choice_bias=True)
    _require(config, "scoring_func", "softmax")
    method = config.text("topk_method", "greedy")
    if method == "greedy":
        return replace(router, scale=config.number("routed_scaling_factor", 1.0))
    if method != "group_limited_greedy":
        raise config.error("topk_method", "octavo chooses experts by greedy or group_limited_greedy")
    return replace(router.in_groups(config), is_group_best=True)


def _require(config: ConfigFile, key: str, value: str) -> None:
    if config.text(key, value) != value:
        raise config.error(key, f"octavo supports {value} only for this family")


def _shared_size(config: ConfigFile) -> int | None:
    if not config.values.get("n_shared_experts", 1):
        return None
    return config.count("n_shared_experts", 1) * config.count("moe_intermediate_size")


def _mlp_kinds(config: ConfigFile, num_dense: int) -> list[str]:
    """Return "dense" or "sparse" for each layer. num_dense: default number of leading dense layers."""
    num_layers = config.count("num_hidden_layers")
    if config.has("mlp_layer_types"):
        kinds = config.values["mlp_layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {_DENSE, _SPARSE}:
            raise config.error("mlp_layer_types", f"must list {_DENSE} or {_SPARSE} for {num_layers} layers")
        return kinds
    if config.count("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "octavo supports 1 only: experts in all layers after the dense ones")
    num_dense = config.values.get("first_k_dense_replace", num_dense)
    if isinstance(num_dense, bool) or not isinstance(num_dense, int) or not 0 <= num_dense <= num_layers:
        raise config.error("first_k_dense_replace", f"must be an integer from 0 to {num_layers}")
    return [_DENSE] * num_dense + [_SPARSE] * (num_layers - num_dense)
