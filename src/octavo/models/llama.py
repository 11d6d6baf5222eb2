"""Llama 2 and 3.x: the plain decoder. Llama 3.1 and later stretch their rotary embedding; biases are an option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.layers import Attention, CausalLM

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Llama's keys. A `sliding_window` in the file means nothing to this architecture and is not read."""
    bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        name,
        sliding_window=(None,) * config.count("num_hidden_layers"),
        default_max_position_embeddings=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def build(context: ModelContext) -> CausalLM:
    """Pack the weights into a model."""
    return CausalLM(context, Attention)
