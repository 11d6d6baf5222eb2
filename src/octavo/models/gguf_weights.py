"""Maps GGUF weights to Hugging Face's names. Only `open` imports torch."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from octavo.models.gguf_config import (
    BLOCK_KINDS,
    EMBEDDING,
    HEAD,
    TABLE,
    GGUFFields,
    find_gguf_family,
    prediction_layers,
)
from octavo.models.gguf_rope import LONG_FACTORS, ROPE_FREQUENCIES, SHORT_FACTORS

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.models.gguf_file import GGUFFile
    from octavo.models.weight_source import StoredTensors

_MODEL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2
    HEAD: "lm_head.weight",
    TABLE: "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_HEAD_NAMES = {"attn_k_b": "k_b_proj", "attn_v_b": "v_b_proj"}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# llama.cpp's names by general.file_type.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
_FILE_TYPE_GUESSED = 1 << 10
_OF_CONFIG = {ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS}


class GGUFWeights:
    """Weights in GGUF files."""

    __slots__ = ("_pairs", "architecture", "family", "file", "path")

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.path = file.path
        self.architecture, self.family = find_gguf_family(file)
        self._pairs: dict[str, int] = {}
        if self.family.rotates_pairs:
            fields = GGUFFields(file, self.architecture)
            heads = fields.count("attention.head_count")
            kv_heads = fields.largest("attention.head_count_kv", heads)
            self._pairs = {"attn_q": heads, "attn_k": kv_heads}

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the matrices, most frequent first."""
        values: Counter[str] = Counter()
        for stored in self.file.tensors.values():
            if len(stored.shape) == 2:
                values[stored.type.name] += math.prod(stored.shape)
        return tuple(name for name, _ in values.most_common())

    @property
    def file_type(self) -> int | None:
        """See `WeightSource`."""
        number = self.file.metadata.get("general.file_type")
        if not isinstance(number, int) or number & ~_FILE_TYPE_GUESSED not in _FILE_TYPES:
            return None
        return number & ~_FILE_TYPE_GUESSED

    @property
    def quantization_level(self) -> str:
        """See `WeightSource`. By default, the most frequent type."""
        return self.types[0] if self.file_type is None else _FILE_TYPES[self.file_type]

    def weight_files(self) -> list[Path]:
        """See `WeightSource`."""
        return list(self.file.paths)

    def config_files(self) -> list[Path]:
        """See `WeightSource`."""
        return []

    def open(self) -> StoredTensors:
        """See `WeightSource`."""
        from octavo.models.gguf_tensors import GGUFTensors  # noqa: PLC0415

        return GGUFTensors(self)

    def names(self) -> dict[str, str]:
        """Map Hugging Face's names to GGUF's."""
        parts, left_out = _LAYER_NAMES | self.family.names, tuple(prediction_layers(self.file))
        read = [name for name in self.file.tensors if name not in _OF_CONFIG and not name.startswith(left_out)]
        return {_hugging_face_name(name, parts): name for name in read}

    def block_bytes(self) -> dict[str, int]:
        """Return each block matrix's bytes in memory."""
        sizes: dict[str, int] = {}
        for name, stored_name in self.names().items():
            stored = self.file.tensors[stored_name]
            if stored.type in BLOCK_KINDS and len(stored.shape) == 2:
                num_blocks = stored.num_bytes // stored.type.block_bytes
                sizes[name] = stored.num_bytes + num_blocks * BLOCK_KINDS[stored.type]
        return sizes

    def heads_of_pairs(self, name: str) -> int | None:
        """Return the number of heads, or None unless neighbouring rows rotate together."""
        part = name.split(".")[-2] if name.count(".") else ""
        return self._pairs.get(part)


def _hugging_face_name(name: str, parts: dict[str, str]) -> str:  # noqa: PLR0911 - a case for each form
    match name.split("."):
        case ["blk", layer, part] if part in parts:
            return f"model.layers.{layer}.{parts[part]}"
        case ["blk", layer, part, kind] if (whole := parts.get(f"{part}.{kind}")) is not None:
            return f"model.layers.{layer}.{whole}"
        case ["blk", layer, part, "weight" | "bias" as kind] if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
        case ["blk", layer, part, expert, "weight" | "bias" as kind] if part in _EXPERT_NAMES:
            return f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_NAMES[part]}.{kind}"
        case ["blk", layer, "shortconv", part, "weight"]:
            return f"model.layers.{layer}.conv.{part}.weight"
        case ["blk", layer, part, head, "weight"] if part in _HEAD_NAMES:
            return f"model.layers.{layer}.self_attn.{_HEAD_NAMES[part]}.{head}.weight"
    return _MODEL_NAMES.get(name, name)
