"""Translates GGUF metadata to config.json. Does not import torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.gguf_file import TensorType
from octavo.models.gguf_rope import read_gguf_rope, read_proportional

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.models.gguf_file import GGUFFile

logger = logging.getLogger(__name__)
EMBEDDING, HEAD, TABLE = "token_embd.weight", "output.weight", "per_layer_token_embd.weight"
_FLOATS = {TensorType.F32: "float32", TensorType.BF16: "bfloat16", TensorType.F16: "float16"}
# Block types that kernels multiply directly, with bytes added to each block in memory.
BLOCK_KINDS = {
    TensorType.Q8_0: 0,
    TensorType.Q4_0: 0,
    TensorType.Q4_1: 0,
    TensorType.Q5_0: 0,
    TensorType.Q5_1: 0,
    TensorType.Q4_K: 4,
    TensorType.Q5_K: 4,
    TensorType.Q6_K: 0,
    TensorType.MXFP4: 0,
}
# Keys that are read from other places, or that llama.cpp ignores.
_NOT_READ = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"),
    *(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
)
_NEUTRAL = {"rope.scaling.attn_factor": 1.0}
_GEMMA_LOCAL_THETA = 10_000.0
# llama.cpp stores these weights in wider types
_WIDENED = (
    TABLE, "per_layer_model_proj", ".ffn_gate_inp", ".ssm_alpha", ".ssm_beta", ".ssm_ba", ".ssm_a", ".ssm_d",
    ".ssm_norm",
)  # fmt: skip
_SMOLLM3_ROPE_PERIOD, _GEMMA2_PERIOD, _GEMMA3_PERIOD, _OLMO3_PERIOD, _GPT_OSS_PERIOD = 4, 2, 6, 4, 2
_MAX_FLOAT32 = 3.4e38
_SOFTMAX, _SIGMOID = 1, 2  # numbers of expert_gating_func
_GELU = "gelu_pytorch_tanh"
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How GGUF files store one of llama.cpp's architectures.

    name              class in `architectures` of config.json
    names             Hugging Face's names that differ from Llama's
    rotates_pairs     neighbouring rows of q and k rotate together
    norms_around_one  norms are factors; Hugging Face stores them minus 1
    """

    name: str
    model_type: str
    read: Callable[[GGUFFields], dict[str, Any]] = lambda _: {}
    names: dict[str, str] = field(default_factory=dict)
    rotates_pairs: bool = False
    norms_around_one: bool = False


class GGUFFields:
    """One architecture's metadata."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self._logged: set[str] = set()
        prefix = f"{architecture}."
        values: dict[str, Any] = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        for key, value in values.items():
            if isinstance(value, list) and value and all(each == value[0] for each in value):
                values[key] = value[0]
        self.values = ConfigFile(file.path, values, prefix)

    def count(self, key: str, default: int | None = None) -> int:
        """See `ConfigFile.count`."""
        return self.values.count(key) if default is None else self.values.count(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the shortest decimal number with the same float32, such as 1e-05 for 9.999999747378752e-06."""
        found = self.values.number(key) if default is None else self.values.number(key, default)
        if found > _MAX_FLOAT32:
            raise self.values.error(key, f"must be at most {_MAX_FLOAT32:g}")
        return float(str(np.float32(found)))

    def optional(self, key: str) -> float | None:
        """Return a number, or None if missing or zero."""
        return self.number(key) if self.values.values.get(key) else None

    def warn(self, message: str) -> None:
        """Log each message once."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s: %s.%s", self.file.path, self.architecture, message)

    def has(self, tensor: str) -> bool:
        """Return whether a tensor exists."""
        return tensor in self.file.tensors

    @property
    def num_layers(self) -> int:
        """Layers without multi-token prediction. Raises `ModelError` if the tensors disagree."""
        left_out = prediction_layers(self.file)
        count = self.count("block_count") - max(len(left_out), int(self.optional("nextn_predict_layers") or 0))
        there = {name.split(".")[1] for name in self.file.tensors if name.startswith("blk.")}
        if count != len(there) - len(left_out):
            raise self.values.error("block_count", f"the file has tensors of {len(there)} layers")
        return count

    @property
    def head_dim(self) -> int:
        """Width of a head's keys and values. With latents, the width of the shared key."""
        if "attention.kv_lora_rank" in self.values.values:
            return self.count("rope.dimension_count")
        heads, hidden = self.count("attention.head_count"), self.count("embedding_length")
        if "attention.key_length" not in self.values.values and hidden % heads:
            raise self.values.error("attention.head_count", f"must divide embedding_length = {hidden}")
        width = self.count("attention.key_length", hidden // heads)
        if self.count("attention.value_length", width) != width:
            raise self.values.error(
                "attention.value_length", f"keys have a width of {width}; octavo needs the same width for both"
            )
        return width

    def counts(self, key: str, least: int = 1) -> list[int]:
        """Return a count for each layer. least: the smallest one that is allowed."""
        values = self.values.values.get(key)
        if not isinstance(values, list):
            return [self.count(key)] * self.num_layers
        self.values.mark(key)
        if len(values) != self.num_layers or any(type(each) is not int or each < least for each in values):
            raise self.values.error(
                key, f"must have {self.num_layers} integers of at least {least}, one for each layer"
            )
        return values

    def largest(self, key: str, default: int | None = None) -> int:
        """Return the largest count of a layer. Layers without the counted things have 0."""
        is_list = isinstance(self.values.values.get(key), list)
        return max(self.counts(key, least=0)) if is_list else self.count(key, default)

    def first_with(self, part: str) -> int | None:
        """Return the first layer that has a tensor."""
        return next((layer for layer in range(self.num_layers) if self.has(f"blk.{layer}.{part}")), None)

    def window(self) -> int | None:
        """Return the sliding window in tokens, or None."""
        return self.count("attention.sliding_window") if self.optional("attention.sliding_window") else None

    def layer_types(self, window: int | None, period: int) -> list[str]:
        """Return each layer's type. Without a stored pattern, every `period`-th layer has full attention."""
        key, num_layers = "attention.sliding_window_pattern", self.num_layers
        self.values.mark(key)
        pattern = self.values.values.get(key, period)
        if isinstance(pattern, bool):
            pattern = [pattern] * num_layers
        elif isinstance(pattern, int):
            pattern = [(layer + 1) % max(pattern, 1) != 0 for layer in range(num_layers)]
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            raise self.values.error(key, f"must have {num_layers} entries, one for each layer")
        return ["sliding_attention" if window and is_near else "full_attention" for is_near in pattern]

    def factors(self, tensor: str) -> list[float]:
        """Read RoPE's factors."""
        stored = self.file.tensors[tensor]
        if stored.type is not TensorType.F32 or len(stored.shape) != 1 or stored.shape[0] > self.head_dim:
            raise ModelError(
                f"{stored.path}: {tensor} is {stored.type.name} {list(stored.shape)}; at most {self.head_dim} "
                "numbers of type F32 are expected"
            )
        found = np.fromfile(stored.path, np.dtype("<f4"), stored.shape[0], offset=stored.offset)
        if not (np.isfinite(found) & (found > 0)).all():
            raise ModelError(f"{stored.path}: {tensor} has a value that is not a number above zero")
        return [float(str(each)) for each in found]


def prediction_layers(file: GGUFFile) -> set[str]:
    """Return the name prefixes of multi-token prediction, which octavo does not load."""
    return {name.partition(".nextn.")[0] + "." for name in file.tensors if ".nextn." in name}


def find_gguf_family(file: GGUFFile) -> tuple[str, GGUFFamily]:
    """Return architecture and family."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ModelError(
            f"{file.path}: general.architecture = {architecture!r}; the supported architectures of GGUF "
            f"files are {known}"
        )
    return architecture, _FAMILIES[architecture]


def read_gguf_config(file: GGUFFile, architecture: str, family: GGUFFamily) -> dict[str, Any]:
    """Return config.json's keys."""
    if EMBEDDING not in file.tensors:
        raise ModelError(
            f"{file.path}: there is no tensor {EMBEDDING}; the file has only a vocabulary, or only a part of the model"
        )
    fields = GGUFFields(file, architecture)
    vocab_size, *width = file.tensors[EMBEDDING].shape
    if [fields.count("embedding_length")] != width:
        raise fields.values.error("embedding_length", f"{EMBEDDING} has the shape {[vocab_size, *width]}")
    heads, head_dim, own = fields.count("attention.head_count"), fields.head_dim, family.read(fields)
    config = {
        "architectures": [family.name],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": own.get("intermediate_size") or fields.count("feed_forward_length"),
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": fields.has("blk.0.attn_q.bias"),
        "mlp_bias": fields.has("blk.0.ffn_up.bias"),
        "rope_parameters": own.get("rope_parameters") or read_gguf_rope(fields),
        "is_causal": fields.values.flag("attention.causal", default=True),
        "dtype": _read_dtype(file),
    }
    rotated = fields.count("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise fields.values.error("rope.dimension_count", f"a head has {head_dim} dimensions")
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config |= own
    _refuse_unread(fields, family.name)
    return config


def _refuse_unread(fields: GGUFFields, name: str) -> None:
    for key in fields.values.unread():
        value = fields.values.values[key]
        if key not in _NOT_READ and value and value != _NEUTRAL.get(key):
            raise fields.values.error(key, f"octavo does not support this for {name}; it would generate wrong tokens")


def _read_dtype(file: GGUFFile) -> str:
    """Return bfloat16 if all matrices outside `BLOCK_KINDS` are, float16 if all matrices are, otherwise float32.

    Ignores `_WIDENED`.
    """
    matrices = {name: each for name, each in file.tensors.items() if len(each.shape) == 2}
    kinds = {each.type for name, each in matrices.items() if not any(part in name for part in _WIDENED)}
    others = kinds - BLOCK_KINDS.keys()
    if len(others) == 1 and others in (kinds, {TensorType.BF16}):
        return _FLOATS.get(others.pop(), "float32")
    return "float32" if others else "bfloat16"


def _read_gemma2(fields: GGUFFields) -> dict[str, Any]:
    window = fields.count("attention.sliding_window", 4096)
    is_27b = fields.num_layers == _GEMMA2_27B_LAYERS
    return {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "sliding_window": window,
        "layer_types": fields.layer_types(window, _GEMMA2_PERIOD),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scalar(fields, is_27b=is_27b),
    }


def _read_gemma3(fields: GGUFFields) -> dict[str, Any]:
    window = fields.window()
    local = fields.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
    keys: dict[str, Any] = {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "layer_types": fields.layer_types(window, _GEMMA3_PERIOD),
        "rope_parameters": {
            "full_attention": read_gguf_rope(fields),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _gemma_scalar(fields, is_27b=fields.num_layers == _GEMMA3_27B_LAYERS),
        "sliding_window": window,
    }
    cap = fields.optional("final_logit_softcapping")
    return keys | ({} if cap is None else {"final_logit_softcapping": cap})


def _read_gemma4(fields: GGUFFields) -> dict[str, Any]:
    window = fields.window()
    kinds, sizes = fields.layer_types(window, _GEMMA3_PERIOD), fields.counts("feed_forward_length")
    num_shared = int(fields.optional("attention.shared_kv_layers") or 0)
    num_own, near_dim = len(kinds) - num_shared, fields.count("attention.key_length_swa", fields.head_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.count(key, near_dim) != near_dim:
            raise fields.values.error(key, f"must be attention.key_length_swa = {near_dim}")
    if (is_wide := len({*sizes}) > 1) and sizes != sizes[:1] * num_own + [2 * sizes[0]] * num_shared:
        raise fields.values.error("feed_forward_length", f"must double in the last {num_shared} layers only")
    theta = fields.number("rope.freq_base", 10_000.0)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", theta)}
    heads = [
        {"head_dim": near_dim if kind == "sliding_attention" else fields.head_dim, "num_key_value_heads": count}
        for kind, count in zip(kinds, fields.counts("attention.head_count_kv"), strict=True)
    ]
    far = kinds.index("full_attention") if "full_attention" in kinds else len(kinds) - 1
    keys: dict[str, Any] = {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        **heads[0],
        "per_layer_config": {str(layer): each for layer, each in enumerate(heads)},
        "attention_k_eq_v": not fields.has(f"blk.{far}.attn_v.weight"),
        "num_kv_shared_layers": num_shared,
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": {"full_attention": read_proportional(fields, theta), "sliding_attention": local},
        "hidden_size_per_layer_input": int(fields.optional("embedding_length_per_layer_input") or 0),
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
    }
    if fields.has(TABLE):
        keys["vocab_size_per_layer_input"] = fields.file.tensors[TABLE].shape[0]
    if not fields.has("blk.0.ffn_gate_inp.weight"):
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            fields.values.mark(key)
        return keys
    return keys | {
        "enable_moe_block": True,
        "num_experts": fields.count("expert_count"),
        "top_k_experts": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
    }


def _gemma_scalar(fields: GGUFFields, *, is_27b: bool) -> int:
    return fields.count("embedding_length") // fields.count("attention.head_count") if is_27b else fields.head_dim


def _read_phi3(fields: GGUFFields) -> dict[str, Any]:
    keys: dict[str, Any] = {"sliding_window": fields.window()}
    original = fields.optional("rope.scaling.original_context_length")
    return keys | ({} if original is None else {"original_max_position_embeddings": int(original)})


def _read_granite(fields: GGUFFields) -> dict[str, Any]:
    given = {
        "logits_scaling": fields.number("logit_scale"),
        "residual_multiplier": fields.optional("residual_scale"),
        "embedding_multiplier": fields.optional("embedding_scale"),
        "attention_multiplier": fields.optional("attention.scale"),
    }
    return {key: value for key, value in given.items() if value is not None}


def _read_dense_granite(fields: GGUFFields) -> dict[str, Any]:
    """The conversion of Granite 4 without Mamba-2 also writes Mamba-2's keys, and the MLP's size as a shared one."""
    _leave_out_mamba2(fields)
    size = fields.optional("expert_shared_feed_forward_length") or fields.count("feed_forward_length")
    fields.values.mark("feed_forward_length")
    return _read_granite(fields) | {"intermediate_size": int(size)}


def _leave_out_mamba2(fields: GGUFFields) -> None:
    for key in fields.values.values:
        if key.startswith("ssm."):
            fields.values.mark(key)


def _read_granite_hybrid(fields: GGUFFields) -> dict[str, Any]:
    keys = _read_granite_4(fields) | _read_mamba2(fields, _GRANITE_MAMBA)
    return keys | {"num_key_value_heads": fields.largest("attention.head_count_kv")}


def _read_granite_4(fields: GGUFFields) -> dict[str, Any]:
    is_recurrent = [fields.has(f"blk.{layer}.ssm_in.weight") for layer in range(fields.num_layers)]
    rotates = fields.values.flag("rope.scaling.finetuned", default=True)  # as in llama.cpp
    size = fields.optional("expert_shared_feed_forward_length") or fields.count("feed_forward_length")
    return _read_granite(fields) | {
        "attention_bias": fields.first_with("attn_q.bias") is not None,
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_recurrent],
        "position_embedding_type": "rope" if rotates else "nope",
        "shared_intermediate_size": int(size),
        "mlp_is_fused": False,
        "num_local_experts": int(fields.optional("expert_count") or 0),
        "num_experts_per_tok": int(fields.optional("expert_used_count") or 0),
    }


_GRANITE_MAMBA = (
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias",
    "mamba_conv_bias",
)  # fmt: skip
_NEMOTRON_MAMBA = (
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias",
)  # fmt: skip


def _read_mamba2(fields: GGUFFields, names: tuple[str, ...]) -> dict[str, Any]:
    """Read the keys of Mamba-2. names: the family's keys of config.json for the sizes and biases."""
    num_heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_heads:
        raise fields.values.error("ssm.inner_size", f"must be a multiple of ssm.time_step_rank = {num_heads}")
    sizes = (fields.count(f"ssm.{name}") for name in ("state_size", "group_count", "conv_kernel"))
    biases = (fields.first_with(f"{part}.bias") is not None for part in ("ssm_in", "ssm_conv1d"))
    values = (num_heads, inner // num_heads, *sizes, *biases)
    return dict(zip(names, values, strict=True)) | {"decay_is_stored": True}


def _read_nemotron_h(fields: GGUFFields) -> dict[str, Any]:
    """The conversion's feed_forward_length is 0 for dense MLPs, so kinds and sizes come from the tensors."""
    kinds = [_nemotron_kind(fields, layer) for layer in range(fields.num_layers)]
    keys = _read_mamba2(fields, _NEMOTRON_MAMBA) | {
        "layers_block_type": kinds,
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "num_key_value_heads": fields.largest("attention.head_count_kv"),
        "intermediate_size": 1,
        "mlp_bias": any(fields.first_with(f"{part}.bias") is not None for part in ("ffn_up", "ffn_up_shexp")),
        "moe_latent_size": fields.optional("moe_latent_size"),
    }
    for key in ("feed_forward_length", "attention.layer_norm_epsilon"):
        fields.values.mark(key)
    if (dense := fields.first_with("ffn_up.weight")) is not None:
        keys["intermediate_size"] = fields.file.tensors[f"blk.{dense}.ffn_up.weight"].shape[0]
    if "moe" in kinds:
        size = fields.count("expert_shared_feed_forward_length")
        return _read_routed(fields, is_sigmoid=True) | keys | {"moe_shared_expert_intermediate_size": size}
    for key in fields.values.values:
        if key.startswith("expert_"):
            fields.values.mark(key)
    return keys


def _nemotron_kind(fields: GGUFFields, layer: int) -> str:
    kinds = {
        "ssm_in": "linear_attention",
        "attn_q": "full_attention",
        "ffn_gate_inp": "moe",
        "ffn_up": "mlp",
    }
    found = [kind for part, kind in kinds.items() if fields.has(f"blk.{layer}.{part}.weight")]
    if len(found) != 1:
        raise ModelError(f"{fields.file.path}: layer {layer} must have one of the tensors {', '.join(kinds)}")
    return found[0]


def _read_smollm3(fields: GGUFFields) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % _SMOLLM3_ROPE_PERIOD != 0) for layer in range(fields.num_layers)]}


def _read_olmo(fields: GGUFFields) -> dict[str, Any]:
    window = fields.window()
    if window is None:
        return {}
    full = read_gguf_rope(fields)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", full["rope_theta"])}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": fields.layer_types(window, _OLMO3_PERIOD),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _read_mistral3(fields: GGUFFields) -> dict[str, Any]:
    beta = fields.optional("attention.temperature_scale")
    fields.values.mark("rope.scaling.yarn_log_multiplier")  # not read with a factor of 1
    if beta is None:
        return {"sliding_window": None}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "sliding_window": None,
        "rope_parameters": read_gguf_rope(fields) | {"llama_4_scaling_beta": beta},
    }


def _read_gemma(_: GGUFFields) -> dict[str, Any]:
    return {"hidden_act": _GELU, "hidden_activation": _GELU}


_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}


def _read_experts(fields: GGUFFields, **more: Any) -> dict[str, Any]:
    size = "expert_feed_forward_length"
    return more | {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count(size if fields.values.has(size) else "feed_forward_length"),
    }


def _read_qwen2_moe(fields: GGUFFields) -> dict[str, Any]:
    shared = fields.count("expert_shared_feed_forward_length")
    return _read_experts(fields, norm_topk_prob=False, shared_expert_intermediate_size=shared)  # as in llama.cpp


def _read_qwen3_moe(fields: GGUFFields) -> dict[str, Any]:
    return _read_experts(fields, norm_topk_prob=True)  # as in llama.cpp


def _read_olmoe(fields: GGUFFields) -> dict[str, Any]:
    return _read_experts(fields, norm_topk_prob=False)  # as in llama.cpp


def _read_gpt_oss(fields: GGUFFields) -> dict[str, Any]:
    window = fields.count("attention.sliding_window")
    fields.values.mark("feed_forward_length")
    return {
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "sliding_window": window,
        "layer_types": fields.layer_types(window, _GPT_OSS_PERIOD),
        "rope_parameters": read_gguf_rope(fields) | {"truncate": False},  # as in transformers; llama.cpp rounds
    }


def _read_llama(fields: GGUFFields) -> dict[str, Any]:
    if not fields.optional("expert_count"):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
    }


def _read_deepseek2(fields: GGUFFields) -> dict[str, Any]:
    for key in ("attention.key_length", "attention.value_length"):
        fields.values.mark(key)
    is_sigmoid, rotated = _scores_by_sigmoid(fields), fields.count("rope.dimension_count")
    rope = read_gguf_rope(fields)
    if (multiplier := fields.optional("rope.scaling.yarn_log_multiplier")) is not None:
        # The converter writes mscale_all_dim / 10. llama.cpp uses an equal mscale, so both cancel in cosines and sines.
        rope |= {"mscale_all_dim": round(10 * multiplier, 6), "attention_factor": 1.0}
    if fields.values.flag("expert_weights_norm", default=False) and not is_sigmoid:
        raise fields.values.error("expert_weights_norm", "octavo normalizes weights of experts of a sigmoid only")
    config = _read_routed(fields, is_sigmoid=is_sigmoid) | {
        "architectures": [f"DeepseekV{3 if is_sigmoid else 2}ForCausalLM"],
        "model_type": f"deepseek_v{3 if is_sigmoid else 2}",
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": _head_width(fields, "key") - rotated,
        "v_head_dim": _head_width(fields, "value"),
        "kv_b_is_split": not fields.has("blk.0.attn_kv_b.weight"),
        "attention_bias": fields.has("blk.0.attn_kv_a_mqa.bias"),
        "rope_parameters": rope,
    }
    rank = fields.optional("attention.q_lora_rank")
    return config if rank is None else config | {"q_lora_rank": int(rank)}


def _head_width(fields: GGUFFields, part: str) -> int:
    """Files with a whole kv_b may store a head's width under the key without `_mla`."""
    key = f"attention.{part}_length"
    return fields.count(
        key if fields.has("blk.0.attn_kv_b.weight") and f"{key}_mla" not in fields.values.values else f"{key}_mla"
    )


def _read_routed(fields: GGUFFields, *, is_sigmoid: bool) -> dict[str, Any]:
    groups = fields.count("expert_group_count", 1)
    return _read_experts(fields) | {
        "norm_topk_prob": fields.values.flag("expert_weights_norm", default=False),
        "topk_method": "noaux_tc" if is_sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": fields.count("expert_group_used_count", 1),
        "n_shared_experts": int(fields.optional("expert_shared_count") or 0),
        "routed_scaling_factor": fields.optional("expert_weights_scale") or 1.0,
        "first_k_dense_replace": int(fields.optional("leading_dense_block_count") or 0),
    }


def _read_glm4_moe(fields: GGUFFields) -> dict[str, Any]:
    _require_sigmoid(fields)
    return _read_routed(fields, is_sigmoid=True) | {
        "use_qk_norm": fields.has("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": fields.count("rope.dimension_count", fields.head_dim) / fields.head_dim,
    }


def _read_granite_moe(fields: GGUFFields) -> dict[str, Any]:
    """Granite 4 without Mamba-2 has a shared expert. Its conversion also writes Mamba-2's keys."""
    if fields.optional("expert_shared_feed_forward_length"):
        _leave_out_mamba2(fields)
        names = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
        return _read_granite_4(fields) | names
    experts = {
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
    }
    return _read_granite(fields) | experts


def _read_lfm2(fields: GGUFFields) -> dict[str, Any]:
    key = "attention.head_count_kv"
    heads = fields.counts(key, least=0)
    if len({*heads} - {0}) > 1:
        raise fields.values.error(key, "must be the same number in all layers with attention, and 0 in the others")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "num_key_value_heads": max(heads),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # files have the adjusted width
    }


def _read_lfm2_moe(fields: GGUFFields) -> dict[str, Any]:
    _require_sigmoid(fields)
    dense = int(fields.optional("leading_dense_block_count") or 0)
    scale = fields.optional("expert_weights_scale") or 1.0
    return _read_lfm2(fields) | _read_experts(fields, num_dense_layers=dense, routed_scaling_factor=scale)


def _require_sigmoid(fields: GGUFFields) -> None:
    if fields.optional("expert_gating_func") not in {None, float(_SIGMOID)}:
        raise fields.values.error("expert_gating_func", f"octavo supports {_SIGMOID} (sigmoid) for this family")


def _read_delta_nets(fields: GGUFFields) -> dict[str, Any]:
    """Read the keys of gated delta nets and of gated attention."""
    fields.values.mark("rope.dimension_sections")  # a text's position dimensions are equal
    num_heads, num_values = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if num_values % num_heads:
        raise fields.values.error("ssm.inner_size", f"must be a multiple of ssm.time_step_rank = {num_heads}")
    return {
        "layer_types": _delta_layers(fields),
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_value_head_dim": num_values // num_heads,
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "partial_rotary_factor": fields.count("rope.dimension_count", fields.head_dim) / fields.head_dim,
        "decay_is_stored": True,
    }


def _delta_layers(fields: GGUFFields) -> list[str]:
    key, num_layers = "attention.recurrent_layers", fields.num_layers
    interval = fields.count("full_attention_interval", 4)
    found = fields.values.values.get(key, [bool((layer + 1) % interval) for layer in range(num_layers)])
    fields.values.mark(key)
    if not isinstance(found, list) or len(found) < num_layers or any(type(each) is not bool for each in found):
        raise fields.values.error(key, f"must have {num_layers} booleans, one for each layer, which are not all equal")
    return ["linear_attention" if each else "full_attention" for each in found[:num_layers]]


def _read_qwen35(fields: GGUFFields) -> dict[str, Any]:
    return _read_delta_nets(fields) | {"value_heads_are_tiled": True}


def _read_qwen35moe(fields: GGUFFields) -> dict[str, Any]:
    return _read_qwen35(fields) | _read_gated_experts(fields)


def _read_qwen3next(fields: GGUFFields) -> dict[str, Any]:
    is_old = any(name.endswith(".ssm_in.weight") for name in fields.file.tensors)
    return _read_delta_nets(fields) | _read_gated_experts(fields) | {"delta_inputs_are_joined": is_old}


def _read_gated_experts(fields: GGUFFields) -> dict[str, Any]:
    fields.values.mark("feed_forward_length")
    shared = fields.count("expert_shared_feed_forward_length")
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
        "intermediate_size": shared,
    }


def _scores_by_sigmoid(fields: GGUFFields) -> bool:
    key = "expert_gating_func"
    if not fields.optional(key):  # only routers with a sigmoid have this bias
        return any(name.endswith(".exp_probs_b.bias") for name in fields.file.tensors)
    number = fields.count(key)
    if number not in {_SOFTMAX, _SIGMOID}:
        raise fields.values.error(key, f"octavo supports {_SOFTMAX} (softmax) and {_SIGMOID} (sigmoid)")
    return number == _SIGMOID


_DEEPSEEK_NAMES = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_GEMMA4_NAMES = _GEMMA_NORMS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_inp.scale": "mlp.router.scale",
    "ffn_down_exps.scale": "mlp.router.per_expert_scale",
}
_POST_NORM, _ROUTER = {"post_attention_norm": "post_attention_layernorm"}, {"ffn_gate_inp": "mlp.router"}
_MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.decay",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SHARED_MLP = {f"ffn_{part}_shexp": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_GRANITE_HYBRID_NAMES = _ROUTER | _SHARED_MLP | _MAMBA_NAMES
_LATENTS = {"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"}
_NEMOTRON_NAMES = _DEEPSEEK_NAMES | _MAMBA_NAMES | _LATENTS
_GLM4_MOE_NAMES, _GPT_OSS_NAMES = _DEEPSEEK_NAMES | _POST_NORM, _POST_NORM | _ROUTER
_OLMO_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", _read_llama, rotates_pairs=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", "qwen2_moe", _read_qwen2_moe),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen35": GGUFFamily("Qwen3_5ForCausalLM", "qwen3_5_text", _read_qwen35, _POST_NORM, norms_around_one=True),
    "qwen35moe": GGUFFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _read_qwen35moe, _POST_NORM, norms_around_one=True
    ),
    "qwen3next": GGUFFamily("Qwen3NextForCausalLM", "qwen3_next", _read_qwen3next, _POST_NORM, norms_around_one=True),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3_moe),
    "olmoe": GGUFFamily("OlmoeForCausalLM", "olmoe", _read_olmoe),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", _read_gemma, norms_around_one=True),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", _read_gemma2, _GEMMA_NORMS, norms_around_one=True),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", _read_gemma3, _GEMMA_NORMS, norms_around_one=True),
    "gemma4": GGUFFamily("Gemma4ForCausalLM", "gemma4_text", _read_gemma4, _GEMMA4_NAMES),
    "deepseek2": GGUFFamily("DeepseekV3ForCausalLM", "deepseek_v3", _read_deepseek2, _DEEPSEEK_NAMES),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", "gpt_oss", _read_gpt_oss, _GPT_OSS_NAMES),
    "phi3": GGUFFamily("Phi3ForCausalLM", "phi3", _read_phi3, _FUSED),
    "mistral3": GGUFFamily("MistralForCausalLM", "mistral", _read_mistral3, rotates_pairs=True),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", "glm4_moe", _read_glm4_moe, _GLM4_MOE_NAMES),
    "granitemoe": GGUFFamily(
        "GraniteMoeForCausalLM", "granitemoe", _read_granite_moe, _ROUTER | _SHARED_MLP, rotates_pairs=True
    ),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", _read_dense_granite, rotates_pairs=True),
    "granitehybrid": GGUFFamily(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _read_granite_hybrid,
        _GRANITE_HYBRID_NAMES,
        rotates_pairs=True,
    ),
    "nemotron_h": GGUFFamily(
        "NemotronHForCausalLM", "nemotron_h", _read_nemotron_h, _NEMOTRON_NAMES, rotates_pairs=True
    ),
    "nemotron_h_moe": GGUFFamily(
        "NemotronHForCausalLM", "nemotron_h", _read_nemotron_h, _NEMOTRON_NAMES, rotates_pairs=True
    ),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", "smollm3", _read_smollm3, rotates_pairs=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", "olmo2", _read_olmo, _OLMO_NORMS),
    "lfm2": GGUFFamily("Lfm2ForCausalLM", "lfm2", _read_lfm2),
    "lfm2moe": GGUFFamily("Lfm2MoeForCausalLM", "lfm2_moe", _read_lfm2_moe),
    "glm4": GGUFFamily("Glm4ForCausalLM", "glm4", names=_GLM_NAMES),
}
