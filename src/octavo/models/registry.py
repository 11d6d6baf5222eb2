"""Which family serves which architecture. A new family is one file and one line here."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from octavo.models.config_file import ConfigFile
from octavo.models.weight_files import was_saved_without_head

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.models.architecture import Architecture

FAMILIES = {
    "GemmaForCausalLM": "octavo.models.gemma",
    "Gemma2ForCausalLM": "octavo.models.gemma2",
    "Gemma3ForCausalLM": "octavo.models.gemma3",
    "Glm4ForCausalLM": "octavo.models.glm",
    "GlmForCausalLM": "octavo.models.glm",
    "GraniteForCausalLM": "octavo.models.granite",
    "LlamaForCausalLM": "octavo.models.llama",
    "MistralForCausalLM": "octavo.models.mistral",
    "MinistralForCausalLM": "octavo.models.ministral",
    "Ministral3ForCausalLM": "octavo.models.ministral",
    "Olmo2ForCausalLM": "octavo.models.olmo",
    "Olmo3ForCausalLM": "octavo.models.olmo",
    "Phi3ForCausalLM": "octavo.models.phi3",
    "Qwen2ForCausalLM": "octavo.models.qwen2",
    "Qwen3ForCausalLM": "octavo.models.qwen3",
    "SmolLM3ForCausalLM": "octavo.models.smollm3",
}


# Models of text and images, and what serves their text part, which stands alone.
TEXT_PARTS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_OF_WHOLE = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


class Family(Protocol):
    """What the module of a family offers."""

    def read_architecture(self, config: ConfigFile, name: str) -> Architecture:
        """Read the family's keys of config.json: what its layers are. Keys that are not read are not computed."""
        ...


def find_family(name: str) -> Family:
    """Return the module that serves an architecture of `FAMILIES`; it is imported now."""
    return cast("Family", import_module(FAMILIES[name]))


def read_architecture(directory: Path) -> Architecture:
    """Read `config.json` in a checkpoint directory. Raises `ModelError` for what octavo cannot serve."""
    architecture = architecture_of(ConfigFile.read(directory / "config.json"))
    if not architecture.tie_word_embeddings and was_saved_without_head(directory):
        architecture = replace(architecture, tie_word_embeddings=True, has_head=False)
    return architecture


def architecture_of(config: ConfigFile) -> Architecture:
    """Let the family that `architectures` names read the keys. Raises `ModelError` for what octavo cannot serve."""
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


def text_part(config: ConfigFile) -> ConfigFile:
    """Return the configuration of the text part of a model of `TEXT_PARTS`, and that of any other as it is.

    What stands of the whole model goes before what stands of its part.
    """
    names = config.values.get("architectures")
    whole = next((name for name in names if name in TEXT_PARTS), None) if isinstance(names, list) else None
    if whole is None:
        return config
    part = config.section("text_config")
    if part is None:
        raise config.error("text_config", f"{whole} needs it: it describes the part that octavo serves")
    shared = {key: config.values[key] for key in _OF_WHOLE if config.has(key)}
    return ConfigFile(config.path, part.values | shared | {"architectures": [TEXT_PARTS[whole]]}, part.prefix)
