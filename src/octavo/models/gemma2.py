"""Gemma 2: norms before and after sublayers, windows in every other layer, soft-capped scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.gemma import GELU, read_gemma
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile
    from octavo.models.rope_config import RopeConfig

MODELS = {"Gemma2ForCausalLM": "Gemma 2"}
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # null means no cap
_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    config = config.with_defaults(**{key: cap for key, cap in _SOFTCAPS.items() if key not in config.values})
    rope = read_rope(config, config.count("max_position_embeddings"))
    softcap = config.optional_number("attn_logit_softcapping")
    return read_mixed(config, name, rope=rope, local_rope=rope, pattern=2, softcap=softcap)


def read_mixed(
    config: ConfigFile,
    name: str,
    *,
    rope: RopeConfig,
    local_rope: RopeConfig,
    pattern: int,
    softcap: float | None = None,
    qk_norm: Literal["head"] | None = None,
) -> Architecture:
    """Read common keys of Gemma 2 and 3.

    local_rope: for layers with a window. pattern: see `read_layer_types`.
    """
    bias = config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    attention = replace(attention, scale=config.number("query_pre_attn_scalar") ** -0.5, softcap=softcap)
    attentions = {FULL: attention, SLIDING: replace(attention, rope=local_rope, window=config.count("sliding_window"))}
    mlp = GatedMLPConfig.read(config, activation_key="hidden_activation", default_activation=GELU)
    architecture = read_gemma(
        config,
        name,
        layers=tuple(
            LayerConfig(attention=attentions[kind], mlp=mlp, norms=_NORMS)
            for kind in read_layer_types(config, pattern=pattern)
        ),
        max_context_tokens=config.count("max_position_embeddings"),
    )
    return replace(architecture, logit_softcap=config.optional_number("final_logit_softcapping"))
