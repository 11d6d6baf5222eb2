"""Ministral: Mistral with windows in some layers. Ministral 3: Mistral with queries scaled by position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.layer_types import FULL, SLIDING, read_layer_types
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"MinistralForCausalLM": "Ministral 8B", "Ministral3ForCausalLM": "Ministral 3"}
_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_DEFAULTS_3 = {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_DEFAULT_WINDOW = 4096  # null means no window


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    is_third = name == "Ministral3ForCausalLM"
    if not is_third and "sliding_window" not in config.values:
        config = config.with_defaults(sliding_window=_DEFAULT_WINDOW)
    config = config.with_defaults(**(_DEFAULTS_3 if is_third else _DEFAULTS))
    max_positions = config.count("max_position_embeddings")
    if is_third and not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise ModelError(f"{config.path}: {config.prefix}rope_parameters is missing; this architecture needs it")
    rope = read_rope(config, max_positions, scales_queries=is_third)
    attention, mlp = AttentionConfig.read(config, rope=rope), GatedMLPConfig.read(config)
    layers = tuple(
        LayerConfig(attention=replace(attention, window=window), mlp=mlp) for window in _read_windows(config)
    )
    return read_decoder(config, name, layers=layers, max_context_tokens=rope.max_context_tokens(max_positions))


def _read_windows(config: ConfigFile) -> list[int | None]:
    num_layers = config.count("num_hidden_layers")
    window = config.count("sliding_window") if config.has("sliding_window") else None
    kinds = [FULL if window is None else SLIDING] * num_layers
    if config.has("layer_types"):
        kinds = read_layer_types(config)
    if window is None and SLIDING in kinds:
        raise config.error("layer_types", f"{SLIDING} needs sliding_window")
    return [window if kind == SLIDING else None for kind in kinds]
