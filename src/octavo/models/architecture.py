"""Describes a checkpoint's computation: shapes and numbers, read once from `config.json`. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.attention import AttentionConfig
from octavo.models.declared import Linear, Norm, in_order
from octavo.models.kv_layout import KVLayout
from octavo.models.quantization_config import read_quantization_config
from octavo.models.stored_floats import StoredFloats
from octavo.models.stored_quantization import SCALE_NAMES, StoredQuantization, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import LayerConfig, LayerTensors

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


class ModelTensors(NamedTuple):
    """The tensors of a model in a checkpoint, in the order in which they are packed. head: None if weights are tied."""

    embedding: Linear
    layers: tuple[LayerTensors, ...]
    final_norm: Norm
    head: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One decoder-only transformer.

    name                the class name under `architectures` in config.json
    max_context_tokens  longest context that it was made for
    dtype               of the checkpoint as its config says ("float32", "bfloat16" or "float16")
    eos_token_ids       of config.json; generation_config.json and the tokenizer may add to them
    stored              how weights are stored that are integers in the checkpoint, or None
    stored_floats       how weights are stored that are floats of 8 or 4 bits, or None
    block_bytes         bytes in memory of each matrix that is multiplied in GGUF's blocks, by its tensor's name
    has_head            False for an embedding model that was saved without lm_head; the weights are tied then
    embedding_scale     factor of the embeddings as they enter the first layer, rounded to the activations' dtype
    norm_offset         added to each norm's weight, since the files store it less that; the sum is kept in float32
    logit_softcap       the cap of logits (see `octavo.kernels.operations.soft_cap`), or None
    text_part_of        the class of the model of text and images to which this text part belongs, or None
    logits_scaling      divisor of the logits
    num_position_dims   dimensions of a position, see `AttentionBatch.rotary_positions`
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_context_tokens: int
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    stored: StoredQuantization | None = None
    stored_floats: StoredFloats | None = None
    block_bytes: Mapping[str, int] = field(default_factory=dict)
    has_head: bool = True
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    logit_softcap: float | None = None
    text_part_of: str | None = None
    logits_scaling: float = 1.0
    num_position_dims: int = 1

    def tensors(self) -> ModelTensors:
        """Declare all tensors that the model takes from a checkpoint."""
        vocabulary = Linear(((_EMBEDDING, self.vocab_size),), self.hidden_size)
        head = Linear(((_HEAD, self.vocab_size),), self.hidden_size)
        return ModelTensors(
            embedding=vocabulary,
            layers=tuple(
                layer.tensors(f"model.layers.{index}", self.hidden_size) for index, layer in enumerate(self.layers)
            ),
            final_norm=Norm("model.norm", self.hidden_size),
            head=None if self.tie_word_embeddings else head,
        )

    def within(self, max_model_len: int) -> Architecture:
        """Return the architecture for sequences of up to `max_model_len` tokens; see `RopeConfig.within`."""
        return replace(self, layers=tuple(layer.within(max_model_len) for layer in self.layers))

    @property
    def attentions(self) -> list[AttentionConfig]:
        """Attention of each layer that has attention, and no other mixer of tokens."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionConfig)]

    @property
    def num_parameters(self) -> int:
        """Number of weights in the checkpoint; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def attention_share(self) -> float:
        """Operations of attention to one more position, over those of a token's matrix products without lm_head.

        Layers with a sliding window do not count: a far position costs them nothing.
        """
        far = sum(each.num_heads * each.head_dim for each in self.attentions if each.window is None)
        products = sum(math.prod(s) for n, s in self.tensor_shapes().items() if len(s) == 2 and not is_vocabulary(n))
        return 2 * far / products

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of the KV cache: what it stores of each layer."""
        return KVLayout(tuple(layer.attention.cache_spec for layer in self.layers))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor in a checkpoint of this architecture, in the order of packing."""
        return {name: shape for each in in_order(self.tensors()) for name, shape in each.shapes.items()}

    def scale_names(self) -> list[str]:
        """Return the names of the tensors in the files that are scales of quantized weights."""
        return [name for name in self.stored_tensors() if name.rpartition(".")[2] in SCALE_NAMES]

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return name and form of every tensor in the files: as in `tensor_shapes`, or as quantization stores it."""
        tensors: dict[str, StoredTensor] = {}
        stored = self.stored or self.stored_floats
        for name, shape in self.tensor_shapes().items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and stored is not None and stored.covers(module):
                tensors |= stored.tensors(module, *shape)
            else:
                tensors[name] = StoredTensor(shape)  # a bias that is needed, even if integers come with optional ones
        return tensors


def is_vocabulary(tensor_name: str) -> bool:
    """Return True if a tensor has a row for each token, so that it may be read by row as an embedding."""
    return tensor_name.removesuffix(".weight") in {_EMBEDDING, _HEAD}


def is_norm(tensor_name: str) -> bool:
    """Return True if a tensor of a checkpoint is the weight of an RMS norm."""
    return tensor_name.endswith("norm.weight")


def read_decoder(
    config: ConfigFile, name: str, *, layers: tuple[LayerConfig, ...], max_context_tokens: int
) -> Architecture:
    """Read the keys that all families share. Raises `ModelError` for a key that is missing or out of range."""
    stored = read_quantization_config(config)
    architecture = Architecture(
        name=name,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=layers,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_context_tokens=max_context_tokens,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=_read_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
        stored=stored if isinstance(stored, StoredQuantization) else None,
        stored_floats=stored if isinstance(stored, StoredFloats) else None,
    )
    if architecture.stored_floats is None:
        return architecture
    return replace(architecture, block_bytes=architecture.stored_floats.block_bytes(architecture.tensor_shapes()))


def _read_dtype(config: ConfigFile) -> str:
    """Return the checkpoint's dtype. transformers 5 writes `dtype`, earlier versions `torch_dtype`."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise config.error(key, f"octavo loads {', '.join(DTYPE_BYTES)}")
    return dtype
