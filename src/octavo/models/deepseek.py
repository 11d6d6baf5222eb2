"""DeepSeek V2, V3 and models with these layers: latent attention, experts and shared experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import Router
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.rope_config import read_rope
from octavo.models.routed_mlps import read_routed_mlps, read_sigmoid_router, require, with_float_routers

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2-Lite and Coder-V2",
    "DeepseekV3ForCausalLM": "DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
}
_V2 = "DeepseekV2ForCausalLM"
_NUM_DENSE = {_V2: 0, "DeepseekV3ForCausalLM": 3, "Glm4MoeLiteForCausalLM": 1}  # as in transformers


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    max_positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_positions)
    interleaved = name == _V2 or config.flag("rope_interleave", default=True)
    rope = replace(rope, interleaved=interleaved)
    attention = LatentAttentionConfig.read(config, rope=rope, scale=_score_factor(config))
    router = _read_v2_router(config) if name == _V2 else read_sigmoid_router(config)
    bias = name == _V2 and config.flag("mlp_bias", default=False)
    mlps = read_routed_mlps(config, router, num_dense=_NUM_DENSE[name], bias=bias)
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in mlps)
    max_context_tokens = rope.max_context_tokens(max_positions)
    return with_float_routers(read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens))


def _score_factor(config: ConfigFile) -> float:
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is None or section.text("rope_type" if section.has("rope_type") else "type", "default") != "yarn":
        return 1.0
    if not section.values.get("mscale_all_dim"):  # zero counts as missing, as in transformers
        return 1.0
    factor = section.number("factor")
    mscale = 1.0 if factor <= 1.0 else 0.1 * section.number("mscale_all_dim") * math.log(factor) + 1.0
    return mscale * mscale


def _read_v2_router(config: ConfigFile) -> Router:
    """V2 scores a group by its best expert, and does not normalize."""
    require(config, "scoring_func", "softmax")
    router, method = Router.read(config, normalizes=False), config.text("topk_method", "greedy")
    if method == "greedy":
        return replace(router, scale=config.number("routed_scaling_factor", 1.0))
    if method != "group_limited_greedy":
        raise config.error("topk_method", "octavo chooses experts by greedy or group_limited_greedy")
    return replace(router.in_groups(config), is_group_best=True)
