"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and a clamped gate.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.experts import SOFTMAX_OF_CHOSEN, ExpertsConfig, Router
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.rope_config import read_rope
from octavo.models.stored_floats import FloatLayout

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"GptOssForCausalLM": "gpt-oss"}
_DEFAULTS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_PERIOD = 2
LIMIT, SLOPE = 7.0, 1.702  # as in `octavo.kernels.interface`, which imports torch


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = _with_defaults(config)
    for key, value in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)):
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
    max_context_tokens = rope.max_context_tokens(max_positions)
    return _without_mxfp4(read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens))


def _with_defaults(config: ConfigFile) -> ConfigFile:
    """Published checkpoints name no dtype."""
    defaults: dict[str, Any] = dict(_DEFAULTS)
    if not config.has("torch_dtype"):
        defaults["dtype"] = "bfloat16"
    if not config.has("rope_scaling"):
        defaults["rope_parameters"] = _YARN
    if config.has("experts_per_token"):
        defaults["num_experts_per_tok"] = config.count("experts_per_token")
    return config.with_defaults(**defaults)


def _without_mxfp4(architecture: Architecture) -> Architecture:
    """Mark weights outside of experts as floats. `modules_to_not_convert` may omit them."""
    floats = architecture.stored_floats
    if floats is None or floats.layout is not FloatLayout.MXFP4_BLOCKS:
        return architecture
    floats = replace(floats, ignored=(*floats.ignored, "self_attn", "mlp.router"))
    return replace(architecture, stored_floats=floats, block_bytes=floats.block_bytes(architecture.tensor_shapes()))
