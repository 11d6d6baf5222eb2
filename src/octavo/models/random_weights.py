"""Random weights and checkpoints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from octavo.models.architecture import is_norm
from octavo.models.registry import read_architecture
from octavo.models.weight_files import LFM2_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from octavo.models.stored_quantization import StoredTensor

DEFAULT_STD = 0.02
_TABLE_ROWS = 4096
# Recurrent layers with these means remember tens of tokens, and their results are not small.
_MEANS = (
    ("_scalar", 1.0), ("scale", 1.0), (".A_log", -2.0), (".linear_attn.norm.weight", 1.0), (".mamba.D", 1.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RepeatedRows:
    """The `TableRows` of repeated first rows."""

    first_rows: Tensor

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """See `TableRows`."""
        return self.first_rows[indices.cpu() % len(self.first_rows)].to(dtype)


class RandomWeights:
    """`StoredTensors` of normally distributed values, with mean 0 (norms: `norm_mean`, scales: 1).

    A tensor depends only on seed and name. Large tables repeat their first rows.
    """

    __slots__ = ("dtype", "norm_mean", "seed", "shapes", "std")

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        seed: int,
        std: float = DEFAULT_STD,
        norm_mean: float = 1.0,
    ) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.seed = seed
        self.std = std
        self.norm_mean = norm_mean

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """Accept any shape."""

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        return self.tensor(name) if name in self.shapes else None

    def weight(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        return self.tensor(name)

    def table(self, name: str) -> RepeatedRows:
        """See `StoredTensors`."""
        num_rows, width = self.shapes[name]
        return RepeatedRows(self._random(name, (min(num_rows, _TABLE_ROWS), width)))

    def release(self) -> None:
        """Do nothing."""

    def tensor(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        return self._random(name, self.shapes[name])

    def _random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        mean = next(
            (mean for ending, mean in _MEANS if name.endswith(ending)), self.norm_mean if is_norm(name) else 0.0
        )
        return torch.empty(shape).normal_(mean, self.std, generator=generator).to(self.dtype)


_NO_SCALING = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
_GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 8.0,
}
_LFM2 = {
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-6,
    "block_auto_adjust_ff_dim": False,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": _DEEPSEEK
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "norm_topk_prob": True},
    "Glm4MoeLiteForCausalLM": _DEEPSEEK
    | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "GemmaForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 37,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 37,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma4ForCausalLM": _GEMMA4
    | {
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 2048,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "Gemma4UnifiedForCausalLM": _GEMMA4 | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True},
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "GraniteMoeForCausalLM": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 37,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
    },
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2
    | {
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "Qwen2MoeForCausalLM": _QWEN_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96},
    "Qwen3MoeForCausalLM": _QWEN_MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "Qwen3NextForCausalLM": _QWEN3_5
    | _QWEN_MOE
    | {
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "NemotronHForCausalLM": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-",
        "num_hidden_layers": 4,
        "layer_norm_epsilon": 1e-6,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "routed_scaling_factor": 1.5,
    },
    "Qwen3_5ForCausalLM": _QWEN3_5 | {"model_type": "qwen3_5_text"},
    "Qwen3_5MoeForCausalLM": _QWEN3_5
    | _QWEN_MOE
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 96},
    "Olmo3ForCausalLM": {
        "rope_parameters": {"full_attention": _NO_SCALING, "sliding_attention": _NO_SCALING},
        "sliding_window": 37,
    },
}


_OF_LFM2 = {ours: theirs for theirs, ours in LFM2_PARTS.items()}
_JOINED = frozenset(
    f"{name}ForCausalLM" for name in ("Gemma4", "GptOss", "GraniteMoe", "GraniteMoeHybrid", "Qwen3_5Moe")
)
_GRANITE_MOE = {
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "mlp.router": "block_sparse_moe.router.layer",
}
_STORED_NAMES = {
    "Lfm2ForCausalLM": _OF_LFM2,
    "Lfm2MoeForCausalLM": _OF_LFM2,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": _GRANITE_MOE
    | {".mlp.gate_up_proj.": ".shared_mlp.input_linear.", ".mlp.down_proj.": ".shared_mlp.output_linear."},
    "Gemma4ForCausalLM": {
        ".mlp.experts": ".experts",
        ".mlp.router.weight": ".router.proj.weight",
        ".mlp.router.": ".router.",
    },
    "NemotronHForCausalLM": {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.layers.": "backbone.layers.",
        ".input_layernorm.": ".norm.",
        ".mamba.": ".mixer.",
        ".self_attn.": ".mixer.",
        ".mlp.": ".mixer.",
    },
    "MixtralForCausalLM": {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    },
}


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a small config.json."""
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return config | _OF_FAMILY.get(name, {}) | changes


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    std: float = DEFAULT_STD,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write config.json and random safetensors. Return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    architecture = read_architecture(directory)
    shapes = architecture.tensor_shapes()
    weights = RandomWeights(shapes, getattr(torch, architecture.dtype), seed, std, 1.0 - architecture.norm_offset)
    shards: list[dict[str, Tensor]] = [{}]
    tensors = {name: weights.tensor(name) for name in shapes}
    if (family := config["architectures"][0]) in _JOINED:
        tensors = _with_joined_experts(tensors, family)
    for name, tensor in tensors.items():
        full = max_shard_bytes is not None and _num_bytes(shards[-1]) + tensor.nbytes > max_shard_bytes
        if full and shards[-1]:
            shards.append({})
        shards[-1][_stored_name(config["architectures"][0], name)] = tensor
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": sum(map(_num_bytes, shards))}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return directory


def _with_joined_experts(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """See `stored_experts`. Only gpt-oss alternates rows and transposes matrices."""
    experts: dict[tuple[str, str], list[Tensor]] = {}
    together = {}
    for name, tensor in tensors.items():
        layer, is_expert, own = name.partition(".experts.")
        if is_expert:
            experts.setdefault((f"{layer}.experts", own.partition(".")[2]), []).append(tensor)
        else:
            together[name] = tensor
    is_gpt_oss = family == "GptOssForCausalLM"
    for layer in dict.fromkeys(layer for layer, _ in experts):
        for kind, suffix in (("weight", ""), ("bias", "_bias")) if is_gpt_oss else (("weight", ""),):
            gate, up, down = (
                torch.stack(experts[layer, f"{part}.{kind}"]) for part in ("gate_proj", "up_proj", "down_proj")
            )
            gate_up = torch.stack((gate, up), dim=2).flatten(1, 2) if is_gpt_oss else torch.cat((gate, up), dim=1)
            for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
                is_transposed = is_gpt_oss and kind == "weight"
                together[f"{layer}.{name}{suffix}"] = (tensor.mT if is_transposed else tensor).contiguous()
    return together


def _stored_name(family: str, name: str) -> str:
    for ours, theirs in _STORED_NAMES.get(family, {}).items():
        name = name.replace(ours, theirs)
    return name


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
