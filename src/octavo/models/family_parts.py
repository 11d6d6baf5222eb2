"""Describes an architecture in words."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.attention import AttentionConfig
from octavo.models.config_file import ConfigFile
from octavo.models.experts import ExpertsConfig
from octavo.models.gated_attention import GatedAttentionConfig
from octavo.models.gated_conv import GatedConvConfig
from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.mamba2 import Mamba2Config
from octavo.models.no_sublayer import NoSublayer
from octavo.models.plain_mlp import PlainMLPConfig
from octavo.models.registry import architecture_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.models.architecture import Architecture
    from octavo.models.decoder_layer import LayerConfig, MLPConfig
    from octavo.models.rope_config import RopeConfig

# 12 layers repeat every family's pattern.
_SAMPLE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_size_per_layer_input": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": [*["linear_attention"] * 5, "full_attention"] * 2,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "shared_intermediate_size": 96,
}
_NEMOTRON_H: dict[str, Any] = {
    "hybrid_override_pattern": "M-M-M*M-M-M*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
}
_HYBRIDS = {"GraniteMoeHybridForCausalLM": _GRANITE_HYBRID, "NemotronHForCausalLM": _NEMOTRON_H}
_OF_DEEPSEEK = frozenset(f"{name}ForCausalLM" for name in ("DeepseekV2", "DeepseekV3", "Glm4Moe", "Glm4MoeLite"))
_QWEN = ("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")
_WITH_EXPERTS = frozenset(
    f"{name}ForCausalLM" for name in ("GptOss", "GraniteMoe", "Lfm2Moe", "Mixtral", "Olmoe", *_QWEN)
)
_LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 6}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"attention_bias": True},
    {"mlp_bias": True},
    {"conv_bias": True},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6},
    {"embedding_multiplier": 2.0},
    {"residual_multiplier": 0.5},
    {"attention_multiplier": 0.5},
    {"logits_scaling": 2.0},
    {"attn_logit_softcapping": 9.0},
    {"final_logit_softcapping": 9.0},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    {"tie_word_embeddings": True},
    {"attention_k_eq_v": True},
    {"mamba_proj_bias": True},
    {"use_bias": True},
    {"hybrid_override_pattern": "MEMEM*MEMEM*"},
    {"time_step_limit": [0.001, 10.0]},
    {"num_kv_shared_layers": 4},
    {"hidden_size_per_layer_input": 16},
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
)
_OF_FILES = frozenset(
    {"stored", "stored_floats", "has_head", "text_part_of", "is_fused", "is_split", "decay_is_stored"}
)
_NAMED = {"shared_layer": "KV of an earlier layer", "embeddings": "per-layer embeddings"}
_OF_KIND = frozenset({"kind", "partial_rotary_factor", "interleaved", "query_scale_beta"})


@dataclass(frozen=True, slots=True)
class Part:
    """A difference from the plain decoder. num_layers: None means the whole model."""

    name: str
    value: str = ""
    num_layers: int | None = None

    def describe(self, num_layers: int) -> str:
        """Describe the part."""
        said = f"{self.name} {self.value}".strip()
        return said if self.num_layers in (None, num_layers) else f"{said} in {self.num_layers} of {num_layers} layers"


def parts_of(architecture: Architecture) -> list[Part]:
    """Return differences from full multi-head attention, two norms and SiLU, without biases."""
    counts: dict[Part, int] = {}
    for layer in architecture.layers:
        for part in dict.fromkeys(_layer_parts(layer)):
            counts[part] = counts.get(part, 0) + 1
    parts = [dataclasses.replace(part, num_layers=count) for part, count in counts.items()]
    if architecture.tie_word_embeddings:
        parts.append(Part("tied embeddings"))
    return [*parts, *_changed("", architecture)]


def family_parts(name: str) -> tuple[list[str], list[str]]:
    """Return a family's constant and optional parts."""
    sample = _SAMPLE | {"architectures": [name]} | (_EXPERTS if name in _WITH_EXPERTS else {})
    sample |= _DEEPSEEK if name in _OF_DEEPSEEK else _HYBRIDS.get(name, {})
    sample |= _LFM2 if name.startswith("Lfm2") else {}
    try:
        always = _names_of(sample | _ROPE)
        sample |= _ROPE
    except ModelError:
        always = _names_of(sample)
    optional: dict[str, None] = {}
    for keys in _OPTIONS:
        with suppress(ModelError):
            optional |= dict.fromkeys(part for part in _names_of(sample | keys) if part not in always)
    return always, list(optional)


def _names_of(config: dict[str, Any]) -> list[str]:
    architecture = architecture_of(ConfigFile(Path("config.json"), config))
    return list(dict.fromkeys(part.name for part in parts_of(architecture)))


def _layer_parts(layer: LayerConfig) -> Iterator[Part]:
    if isinstance(layer.attention, AttentionConfig):
        yield from _attention_parts(layer.attention)
    elif isinstance(layer.attention, LatentAttentionConfig):
        yield Part("multi-head latent attention")
        yield from _changed("attention", layer.attention)
        yield from _rope_parts(layer.attention.rope)
    elif isinstance(layer.attention, GatedDeltaConfig):
        yield Part("gated delta net")
    elif isinstance(layer.attention, GatedConvConfig):
        yield Part("gated short convolution")
        yield from _changed("convolution", layer.attention)
    elif isinstance(layer.attention, Mamba2Config):
        yield Part("Mamba-2")
        yield from _changed("Mamba-2", layer.attention)
    elif not isinstance(layer.attention, NoSublayer):
        yield Part("attention")
    yield from _mlp_parts(layer.mlp)
    if isinstance(layer.attention, NoSublayer) or isinstance(layer.mlp, NoSublayer):
        yield Part("one sublayer per layer")
        return
    places = [each.name for each in dataclasses.fields(layer.norms) if getattr(layer.norms, each.name) is not None]
    if places != ["before_attention", "before_mlp"]:
        yield Part(f"norms {' and '.join(map(_words, places))}")
    yield from _changed("", layer)


def _mlp_parts(mlp: MLPConfig) -> Iterator[Part]:
    if isinstance(mlp, PlainMLPConfig) or (isinstance(mlp, ExpertsConfig) and not mlp.is_gated):
        yield Part("MLP without a gate")
    if not isinstance(mlp, ExpertsConfig):
        yield from _changed("MLP", mlp)
        return
    yield Part("experts", f"{mlp.router.num_chosen} of {mlp.router.num_experts}")
    if mlp.shared_size is not None:
        yield Part("shared expert")
    if mlp.latent_size is not None:
        yield Part("latent inputs of experts", f"{mlp.latent_size}")
    if mlp.has_bias:
        yield Part("experts bias")
    if mlp.activation != "silu":
        yield Part("experts activation", mlp.activation)


def _attention_parts(attention: AttentionConfig) -> Iterator[Part]:
    if attention.num_kv_heads < attention.num_heads:
        yield Part("grouped-query attention")
    if isinstance(attention, GatedAttentionConfig):
        yield Part("gated attention output")
    yield from _changed("attention", attention)
    if attention.rope is None:
        yield Part("no rotary embedding")
    else:
        yield from _rope_parts(attention.rope)


def _rope_parts(rope: RopeConfig) -> Iterator[Part]:
    leave_out = frozenset(each.name for each in dataclasses.fields(rope)) - _OF_KIND
    yield from _changed("rope", rope, leave_out)


def _changed(prefix: str, described: Any, leave_out: frozenset[str] = _OF_FILES) -> Iterator[Part]:
    for each in dataclasses.fields(described):
        value = getattr(described, each.name)
        if each.default is dataclasses.MISSING or each.name in leave_out or value == each.default:
            continue
        if each.name in _NAMED:
            yield Part(_NAMED[each.name])
            continue
        name = f"{prefix} {_words(each.name)}".strip()
        yield Part(name, "" if value is True else f"{value:g}" if isinstance(value, int | float) else str(value))


def _words(name: str) -> str:
    return "scaling" if name == "kind" else name.replace("_", " ").replace("mlp", "MLP")
