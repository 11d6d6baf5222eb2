"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and a clamped gate.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.kernels.interface import GATE_LIMIT, GATE_SLOPE
from octavo.kernels.operations.choose_experts import SOFTMAX_OF_CHOSEN
from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import ExpertsConfig, Router
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"GptOssForCausalLM": "gpt-oss"}
_DEFAULTS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128}
_PERIOD = 2


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    for key, value in (("swiglu_limit", GATE_LIMIT), ("swiglu_alpha", GATE_SLOPE)):
        if config.number(key, value) != value:
            raise config.error(key, f"octavo computes {value:g} only")
    max_positions, bias = config.count("max_position_embeddings"), config.flag("attention_bias", default=True)
    rope = read_rope(config, max_positions)
    full = replace(AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias), sinks=True)
    attentions = {FULL: full, SLIDING: replace(full, window=config.count("sliding_window"))}
    router = replace(Router.read(config, normalizes=True), scoring=SOFTMAX_OF_CHOSEN, has_bias=True)
    experts = ExpertsConfig(
        router=router,
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("intermediate_size"),
        activation="clamped_silu",
        has_bias=True,
        router_name="router",
    )
    kinds = read_layer_types(config, pattern=_PERIOD)
    layers = tuple(LayerConfig(attention=attentions[kind], mlp=experts) for kind in kinds)
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))
