"""Qwen3's mixtures of experts, in all or some layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.architecture import Architecture, read_decoder
from octavo.models.qwen2 import layers_with_windows
from octavo.models.qwen2_moe import with_experts
from octavo.models.qwen3 import read_attention

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

MODELS = {"Qwen3MoeForCausalLM": "Qwen3 MoE, Qwen3-Coder"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`."""
    attention, max_context_tokens = read_attention(config)
    windows = layers_with_windows(config, attention, lambda _index, _bound: True)
    layers = with_experts(config, windows)
    return read_decoder(config, name, layers=layers, max_context_tokens=max_context_tokens)
