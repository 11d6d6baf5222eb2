"""OLMoE: norms over all queries and all keys of a token, and experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"OlmoeForCausalLM": "OLMoE"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read OLMoE's keys. `intermediate_size` is one expert's."""
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    max_positions, bias = config.count("max_position_embeddings"), config.flag("attention_bias", default=False)
    rope, mlp = read_rope(config, max_positions), GatedMLPConfig.read(config)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="width")
    experts = ExpertsConfig(
        router=Router.read(config, normalizes=config.flag("norm_topk_prob", default=False)),
        hidden_size=config.count("hidden_size"),
        expert_size=mlp.intermediate_size,
        activation=mlp.activation,
    )
    layers = (LayerConfig(attention=attention, mlp=experts),) * config.count("num_hidden_layers")
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))
