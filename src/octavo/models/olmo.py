"""OLMo 2 and 3: post-norms, and norms over all queries and all keys of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"Olmo2ForCausalLM": "OLMo 2", "Olmo3ForCausalLM": "OLMo 3"}
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_DEFAULTS_3 = {"sliding_window": 4096, "rope_theta": 500_000.0}
_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    is_third = name == "Olmo3ForCausalLM"
    config = config.with_defaults(**(_DEFAULTS | (_DEFAULTS_3 if is_third else {})))
    max_positions, bias = config.count("max_position_embeddings"), config.flag("attention_bias", default=False)
    rope, local_rope = _read_ropes(config) if is_third else (read_rope(config, max_positions), None)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="width")
    attentions = {FULL: attention}
    if local_rope is not None:
        attentions[SLIDING] = replace(attention, rope=local_rope, window=config.count("sliding_window"))
    kinds = read_layer_types(config, pattern=4) if is_third else [FULL] * config.count("num_hidden_layers")
    mlp = GatedMLPConfig.read(config)
    layers = tuple(LayerConfig(attention=attentions[kind], mlp=mlp, norms=_NORMS) for kind in kinds)
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))


def _read_ropes(config: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    max_positions, kinds = config.count("max_position_embeddings"), config.section("rope_parameters")
    if kinds is None:
        return read_rope(config, max_positions), RopeConfig(theta=config.number("rope_theta"))
    ropes = []
    for kind in (FULL, SLIDING):
        section = kinds.section(kind)
        if section is None:
            raise kinds.error(kind, "is missing; this architecture has a rotary embedding for each type of layer")
        ropes.append(read_rope(config, max_positions, section=section))
    return ropes[0], ropes[1]
