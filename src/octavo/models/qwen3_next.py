"""Qwen3-Next: the layers of `qwen3_5_moe`, whose gated delta nets store the inputs of each key head together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.qwen3_5 import read_hybrid

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile

MODELS = {"Qwen3NextForCausalLM": "Qwen3-Next"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """See `Family`. Layers for multi-token prediction are not loaded."""
    config = config.with_defaults(norm_topk_prob=True)
    has_joined_inputs = config.flag("delta_inputs_are_joined", default=True)
    delta = replace(GatedDeltaConfig.read(config), has_joined_inputs=has_joined_inputs, has_joined_rates=True)
    return read_hybrid(config, name, delta, shared_size=config.count("shared_expert_intermediate_size", 512))
