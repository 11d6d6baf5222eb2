"""Finds the text part of models of text and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.models.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Mapping

# The text part's class, by the whole model's class and `model_type`.
TEXT_PARTS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}
# These models may mix the text part's keys with the whole model's.
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
_OF_WHOLE = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
_TIED, _ROPES = "tie_word_embeddings", ("rope_scaling", "rope_parameters")


def text_part(config: ConfigFile) -> ConfigFile:
    """Return the text part, or `config` itself for a text model.

    Token ids, dtype and quantization come from the whole model.
    """
    names = config.values.get("architectures")
    whole = next((name for name in names if name in TEXT_PARTS), None) if isinstance(names, list) else None
    return config if whole is None else _part_of(config, whole)


def _part_of(config: ConfigFile, whole: str) -> ConfigFile:
    part, kinds = config.section("text_config"), TEXT_PARTS[whole]
    kind = config.values.get("model_type") if part is None else part.values.get("model_type", next(iter(kinds)))
    if part is None and kind in _FLAT:
        part, kind = config, _FLAT[kind]
    if part is None:
        raise config.error("text_config", f"{whole} needs it, because octavo serves this part")
    if kind not in kinds:
        raise part.error("model_type", f"octavo serves {', '.join(kinds)} as the text part of {whole}")
    values = part.values | {key: config.values[key] for key in _OF_WHOLE if config.has(key)}
    tied = [each.flag(_TIED) for each in (config, part) if each.has(_TIED)]
    values |= {_TIED: any(tied)} if tied else {}
    values |= {key: without_mrope(values[key]) for key in _ROPES if isinstance(values.get(key), dict)}
    return ConfigFile(config.path, values | {"architectures": [kinds[kind]]}, part.prefix)


def without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Replace mrope by plain rotation, because a text's position dimensions are equal."""
    kept = {key: value for key, value in rope.items() if key not in {"mrope_section", "mrope_interleaved"}}
    return kept | {key: "default" for key in ("rope_type", "type") if rope.get(key) == "mrope"}
