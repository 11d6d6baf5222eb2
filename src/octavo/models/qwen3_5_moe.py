"""Qwen3.5's and Qwen3.6's mixtures of experts: the layers of `qwen3_5`, with experts and a gated shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.qwen3_5 import read_hybrid

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile

MODELS = {"Qwen3_5MoeForCausalLM": "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B"}
_ALL_LAYERS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`. Layers for multi-token prediction are not loaded."""
    shared_size = config.count("shared_expert_intermediate_size", 512)
    config = config.with_values(_ALL_LAYERS).with_defaults(intermediate_size=shared_size)
    return read_hybrid(config, name, GatedDeltaConfig.read(config), shared_size=shared_size)
