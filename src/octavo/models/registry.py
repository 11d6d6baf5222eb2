"""Maps architectures to the modules of their families."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from octavo.models.config_file import ConfigFile
from octavo.models.experts import ROUTERS, ExpertsConfig
from octavo.models.stored_quantization import StoredLayout
from octavo.models.text_part import TEXT_PARTS, text_part
from octavo.models.weight_files import decoder_names, stored_names, was_saved_without_head

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.models.architecture import Architecture

FAMILIES = {
    "DeepseekV2ForCausalLM": "octavo.models.deepseek",
    "DeepseekV3ForCausalLM": "octavo.models.deepseek",
    "GemmaForCausalLM": "octavo.models.gemma",
    "Gemma2ForCausalLM": "octavo.models.gemma2",
    "Gemma3ForCausalLM": "octavo.models.gemma3",
    "Gemma4ForCausalLM": "octavo.models.gemma4",
    "Gemma4UnifiedForCausalLM": "octavo.models.gemma4",
    "Glm4ForCausalLM": "octavo.models.glm",
    "Glm4MoeForCausalLM": "octavo.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "octavo.models.deepseek",
    "GlmForCausalLM": "octavo.models.glm",
    "GptOssForCausalLM": "octavo.models.gpt_oss",
    "GraniteForCausalLM": "octavo.models.granite",
    "GraniteMoeForCausalLM": "octavo.models.granite",
    "GraniteMoeHybridForCausalLM": "octavo.models.granite_hybrid",
    "Lfm2ForCausalLM": "octavo.models.lfm2",
    "Lfm2MoeForCausalLM": "octavo.models.lfm2",
    "LlamaForCausalLM": "octavo.models.llama",
    "MistralForCausalLM": "octavo.models.mistral",
    "MinistralForCausalLM": "octavo.models.ministral",
    "Ministral3ForCausalLM": "octavo.models.ministral",
    "MixtralForCausalLM": "octavo.models.mixtral",
    "NemotronHForCausalLM": "octavo.models.nemotron_h",
    "Olmo2ForCausalLM": "octavo.models.olmo",
    "Olmo3ForCausalLM": "octavo.models.olmo",
    "OlmoeForCausalLM": "octavo.models.olmoe",
    "Phi3ForCausalLM": "octavo.models.phi3",
    "Qwen2ForCausalLM": "octavo.models.qwen2",
    "Qwen2MoeForCausalLM": "octavo.models.qwen2_moe",
    "Qwen3ForCausalLM": "octavo.models.qwen3",
    "Qwen3MoeForCausalLM": "octavo.models.qwen3_moe",
    "Qwen3NextForCausalLM": "octavo.models.qwen3_next",
    "Qwen3_5ForCausalLM": "octavo.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "octavo.models.qwen3_5_moe",
    "SmolLM3ForCausalLM": "octavo.models.smollm3",
}


_LAYERS, _MOST_LAYERS = "num_hidden_layers", 1024  # more could exhaust memory


class Family(Protocol):
    """A family's module. MODELS: model names by architecture."""

    MODELS: dict[str, str]

    def read_architecture(self, config: ConfigFile, name: str) -> Architecture:
        """Read config.json."""
        ...


def find_family(name: str) -> Family:
    """Import a family's module."""
    return cast("Family", import_module(FAMILIES[name]))


def read_architecture(directory: Path) -> Architecture:
    """Read a checkpoint's architecture."""
    architecture = architecture_of(ConfigFile.read(directory / "config.json"))
    if not architecture.tie_word_embeddings and was_saved_without_head(directory):
        architecture = replace(architecture, tie_word_embeddings=True, has_head=False)
    return _with_routers_of_files(architecture, directory)


def _with_routers_of_files(architecture: Architecture, directory: Path) -> Architecture:
    """Read routers as floats if a GPTQ checkpoint stores floats. Its configuration often does not say so."""
    stored = architecture.stored
    has_experts = any(isinstance(layer.mlp, ExpertsConfig) for layer in architecture.layers)
    if stored is None or stored.layout is not StoredLayout.GPTQ or not has_experts:
        return architecture
    names = decoder_names(stored_names(directory))
    floats = [each for each in ROUTERS if any(name.endswith(f".{each}.weight") for name in names)]
    return replace(architecture, stored=replace(stored, ignored=(*stored.ignored, *floats)))


def architecture_of(config: ConfigFile) -> Architecture:
    """Read a configuration."""
    if config.has(_LAYERS) and config.count(_LAYERS) > _MOST_LAYERS:
        raise config.error(_LAYERS, f"octavo supports at most {_MOST_LAYERS}")
    names = config.values.get("architectures")
    known = ", ".join([*FAMILIES, *TEXT_PARTS])
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise config.error("architectures", f"must name the model's class; octavo serves {known}")
    for name in names:
        if name in FAMILIES:
            architecture = find_family(name).read_architecture(config, name)
            config.refuse_unread(name)
            return architecture
        if name in TEXT_PARTS:
            return replace(architecture_of(text_part(config)), text_part_of=name)
    raise config.error("architectures", f"unknown architecture; octavo serves {known}")
