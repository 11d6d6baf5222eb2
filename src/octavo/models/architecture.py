"""What a checkpoint computes: shapes and numbers, read once from `config.json`. No torch here, only arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import DEFAULT_GROUP_SIZE
from octavo.models.rope_config import RopeConfig, read_rope
from octavo.models.stored_quantization import StoredQuantization, StoredTensor, read_stored_quantization

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_HEAD_DIM = 256  # what the compiled kernels' buffers hold
_ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One decoder-only transformer.

    name            the class name under `architectures` in config.json
    sliding_window  one entry per layer: tokens a position sees, itself included, or None for all
    dtype           of the checkpoint as its config says ("float32", "bfloat16" or "float16")
    eos_token_ids   as config.json says; generation_config.json and the tokenizer may add to them
    stored          how weights are stored that are integers already, or None
    has_head        False for a model of embeddings that was saved without lm_head; the weights are tied then
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    stored: StoredQuantization | None = None
    has_head: bool = True

    @property
    def max_context_tokens(self) -> int:
        """Longest context the position encoding was made for; linear and yarn scaling extend it (as vLLM reckons)."""
        if self.rope.kind == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return int(self.rope.original_max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Number of weights in the checkpoint; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def weight_bytes(
        self,
        dtype: str,
        norm_dtype: str | None = None,
        quantization: str | None = None,
        group_size: int = DEFAULT_GROUP_SIZE,
    ) -> int:
        """Bytes of all weights in `dtype`; norm weights are kept in `norm_dtype` (that of the activations).

        quantization, group_size: how matrices are rounded that are not stored as integers. An int8 matrix takes a byte
        a weight, and four for the scale of each row; an int4 one half a byte, two for each scale and zero point, and
        four for the unit of each row.
        """
        total = 0
        for name, shape in self.tensor_shapes().items():
            bits, groups, zeros = self._rounding(name, shape, quantization, group_size)
            if bits == 8:
                total += math.prod(shape) + 4 * shape[0]
            elif bits == 4:
                total += math.prod(shape) // 2 + 2 * shape[0] * groups * (2 if zeros else 1) + 4 * shape[0]
            else:
                total += math.prod(shape) * DTYPE_BYTES[(norm_dtype or dtype) if is_norm(name) else dtype]
        return total

    def _rounding(
        self, name: str, shape: tuple[int, ...], quantization: str | None, group_size: int
    ) -> tuple[int | None, int, bool]:
        """Return (bits, scales of a row, whether there are zero points) of a tensor; bits None: not rounded."""
        if len(shape) != 2:
            return None, 0, False
        if self.stored is not None and self.stored.covers(name.removesuffix(".weight")):
            return self.stored.bits, self.stored.num_groups(shape[1]), self.stored.has_zeros
        bits = rounded_bits(name, quantization)
        return bits, -(-shape[1] // group_size) if bits == 4 else 1, False

    @property
    def attention_share(self) -> float:
        """Operations of attention to one more position, over those of a token's matrix products without lm_head.

        Layers with a sliding window do not count: a far position costs them nothing.
        """
        far_layers = sum(window is None for window in self.sliding_window)
        products = sum(math.prod(s) for n, s in self.tensor_shapes().items() if len(s) == 2 and not is_vocabulary(n))
        return 2 * far_layers * self.num_heads * self.head_dim / products

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token keeps over all layers; a row of int8 has a scale of four bytes."""
        row_bytes = self.head_dim + 4 if dtype == "int8" else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * row_bytes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor a checkpoint of this architecture holds, in the order they are packed."""
        hidden, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocab, hidden)
        return shapes

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Name and form of every tensor in the files: as `tensor_shapes`, or as the integers are stored."""
        tensors: dict[str, StoredTensor] = {}
        for name, shape in self.tensor_shapes().items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and self.stored is not None and self.stored.covers(module):
                tensors |= self.stored.tensors(module, *shape)
            else:
                tensors[name] = StoredTensor(shape)  # a bias that is needed, even if integers come with optional ones
        return tensors

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, intermediate = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            ("self_attn.q_proj", q_rows, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_rows, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_rows, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q_rows, self.o_bias),
            ("mlp.gate_proj", intermediate, hidden, self.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows, columns, bias in linears:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        return shapes


def rounded_bits(matrix_name: str, quantization: str | None) -> int | None:
    """Return the bits that a matrix is rounded to as it is loaded, or None: see `octavo.config.ModelConfig`."""
    if quantization is None:
        return None
    is_int8 = quantization == "int8" or (quantization == "int4" and is_vocabulary(matrix_name))
    return 8 if is_int8 else 4


def is_vocabulary(tensor_name: str) -> bool:
    """Whether a tensor has a row for each token, and so may be read by row as an embedding."""
    return tensor_name in {"model.embed_tokens.weight", "lm_head.weight"}


def is_norm(tensor_name: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of an RMS norm."""
    return tensor_name.endswith("norm.weight")


def read_decoder(
    config: ConfigFile,
    name: str,
    *,
    sliding_window: tuple[int | None, ...],
    default_head_dim: int | None = None,
    default_num_kv_heads: int | None = None,
    default_max_position_embeddings: int,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Architecture:
    """Read what all families share. Raises `ModelError` for what is missing, out of range or not supported."""
    config.refuse_unsupported()
    activation = config.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise config.error("hidden_act", f"octavo computes {' and '.join(_ACTIVATIONS)} only")
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    if default_num_kv_heads is None or "num_key_value_heads" in config.values:
        default_num_kv_heads = num_heads  # null means that, too
    num_kv_heads = config.count("num_key_value_heads", default_num_kv_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    if default_head_dim is None and not config.has("head_dim") and hidden_size % num_heads:
        raise config.error("hidden_size", f"must be a multiple of num_attention_heads = {num_heads} without head_dim")
    head_dim = config.count("head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"rotary embeddings need an even head_dim, not {head_dim}")
    if head_dim > _MAX_HEAD_DIM:
        raise config.error("head_dim", f"octavo's kernels compute heads of up to {_MAX_HEAD_DIM}, not {head_dim}")
    max_position_embeddings = config.count("max_position_embeddings", default_max_position_embeddings)
    return Architecture(
        name=name,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_layers=len(sliding_window),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        dtype=_read_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
        stored=read_stored_quantization(config),
    )


def _read_dtype(config: ConfigFile) -> str:
    """Return the checkpoint's dtype; transformers 5 writes `dtype`, before it was `torch_dtype`."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise config.error(key, f"octavo loads {', '.join(DTYPE_BYTES)}")
    return dtype
