"""GLM-4: half of each head is rotated, in neighbouring pairs. The newer version has post-norms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"GlmForCausalLM": "GLM-4 9B", "Glm4ForCausalLM": "GLM-4-0414, GLM-Z1"}
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_NORMS_4 = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    max_positions = config.count("max_position_embeddings")
    rope = replace(read_rope(config, max_positions, is_partial=True), interleaved=True)
    layer = LayerConfig(
        attention=AttentionConfig.read(config, rope=rope, qkv_bias=config.flag("attention_bias")),
        mlp=GatedMLPConfig.read(config, is_fused=True),
        norms=_NORMS_4 if name == "Glm4ForCausalLM" else LayerNorms(),
    )
    return read_decoder(
        config,
        name,
        layers=(layer,) * config.count("num_hidden_layers"),
        max_context_tokens=rope.max_context_tokens(max_positions),
    )
