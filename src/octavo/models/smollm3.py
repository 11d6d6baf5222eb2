"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import SLIDING, read_layer_types
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"SmolLM3ForCausalLM": "SmolLM3"}
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    max_positions = config.count("max_position_embeddings")
    rope, bias = read_rope(config, max_positions), config.flag("attention_bias", default=False)
    attention = AttentionConfig.read(config, rope=rope, qkv_bias=bias, o_bias=bias)
    mlp = GatedMLPConfig.read(config, bias=config.flag("mlp_bias", default=False))
    rotates = _read_rotates(config)
    layers = tuple(
        LayerConfig(attention=replace(attention, rope=rope if rotated else None, window=window), mlp=mlp)
        for rotated, window in zip(rotates, _read_windows(config, rotates), strict=True)
    )
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))


def _read_rotates(config: ConfigFile) -> list[bool]:
    num_layers, interval = config.count("num_hidden_layers"), config.count("no_rope_layer_interval")
    every = [int((index + 1) % interval != 0) for index in range(num_layers)]
    flags = config.whole_numbers("no_rope_layers", every)
    if len(flags) < num_layers or set(flags) - {0, 1}:
        raise config.error("no_rope_layers", f"must list 1 (rope) or 0 (none) for each of {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]


def _read_windows(config: ConfigFile, rotates: list[bool]) -> list[int | None]:
    if not config.flag("use_sliding_window", default=False) or not config.has("sliding_window"):
        return [None] * len(rotates)
    has_window = [not rotated for rotated in rotates]
    if config.has("layer_types"):
        has_window = [kind == SLIDING for kind in read_layer_types(config)]
    return [config.count("sliding_window") if each else None for each in has_window]
