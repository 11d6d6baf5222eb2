"""Mistral: Llama's decoder without biases; in early checkpoints every layer sees a sliding window only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.layers import Attention, CausalLM

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext

_DEFAULT_WINDOW = 4096  # of files without the key; null means no window


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Mistral's keys."""
    has_window = config.values.get("sliding_window", _DEFAULT_WINDOW) is not None
    window = config.count("sliding_window", _DEFAULT_WINDOW) if has_window else None
    num_layers = config.count("num_hidden_layers")
    kind = "sliding_attention" if has_window else "full_attention"
    if config.values.get("layer_types") not in (None, [kind] * num_layers):
        raise config.error("layer_types", f"octavo supports Mistral with {kind} in every layer of this checkpoint")
    return read_decoder(
        config,
        name,
        sliding_window=(window,) * num_layers,
        default_num_kv_heads=8,
        default_max_position_embeddings=131072,
    )


def build(context: ModelContext) -> CausalLM:
    """Pack the weights into a model."""
    return CausalLM(context, Attention)
