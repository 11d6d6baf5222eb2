"""GLM-4.5 and 4.6: partly rotated heads, and experts of DeepSeek V3's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.rope_config import read_rope
from octavo.models.routed_mlps import read_routed_mlps, read_sigmoid_router, with_float_routers

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5-Air, GLM-4.6"}
_PARTIAL = "partial_rotary_factor"


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`. By default, half of each head rotates."""
    rope_section = config.section("rope_scaling") or config.section("rope_parameters")
    if rope_section is None or not rope_section.has(_PARTIAL):
        config = config.with_defaults(partial_rotary_factor=0.5)
    max_positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_positions, is_partial=True)
    has_norms, bias = config.flag("use_qk_norm", default=False), config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, qk_norm="head" if has_norms else None)
    mlps = read_routed_mlps(config, read_sigmoid_router(config), num_dense=1)
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in mlps)
    max_context_tokens = rope.max_context_tokens(max_positions)
    return with_float_routers(read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens))
