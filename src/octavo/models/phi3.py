"""Phi-3, Phi-3.5 and Phi-4 mini: fused projections in files, and longrope."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4, Phi-4 mini"}
_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    config = config.with_defaults(**_DEFAULTS)
    max_positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_positions, is_partial=True)
    if rope.kind not in {"default", "longrope"}:
        raise config.error("rope_scaling", f"{name} supports longrope, not {rope.kind}")
    attention = AttentionConfig.read(config, rope=rope, is_fused=True)
    window = config.count("sliding_window") if config.has("sliding_window") else None
    layer = LayerConfig(attention=replace(attention, window=window), mlp=GatedMLPConfig.read(config, is_fused=True))
    return read_decoder(
        config, name, layers=(layer,) * config.count("num_hidden_layers"), max_context_tokens=max_positions
    )
