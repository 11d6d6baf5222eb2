"""Mixtral: Mistral's attention, and experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.experts import ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.mistral import read_architecture as read_mistral

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile

MODELS = {"MixtralForCausalLM": "Mixtral"}


def read_architecture(config: ConfigFile, name: str) -> Architecture:
    """Read Mixtral's keys. `intermediate_size` is one expert's."""
    architecture = read_mistral(config.with_defaults(sliding_window=None), name)
    mlp = GatedMLPConfig.read(config)
    experts = ExpertsConfig(
        router=Router.read(config, normalizes=True),
        hidden_size=architecture.hidden_size,
        expert_size=mlp.intermediate_size,
        activation=mlp.activation,
    )
    return replace(architecture, layers=tuple(replace(layer, mlp=experts) for layer in architecture.layers))
