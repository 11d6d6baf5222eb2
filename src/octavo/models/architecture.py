"""Describes the computation of a checkpoint. Does not import torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.errors import ConfigError
from octavo.models.attention import AttentionConfig
from octavo.models.declared import Linear, Norm, RowsPart, Table, VectorPart, in_order
from octavo.models.experts import ExpertsConfig
from octavo.models.kv_layout import KVLayout
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.quantization_config import read_quantization_config
from octavo.models.split import split_layer
from octavo.models.stored_floats import StoredFloats
from octavo.models.stored_quantization import SCALE_NAMES, StoredQuantization, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import LayerConfig, LayerTensors
    from octavo.models.per_layer_embeddings import InputsTensors, PerLayerEmbeddings
    from octavo.models.share import Share

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_NORM = re.compile(r"norm(_\d)?\.weight$")


class ModelTensors(NamedTuple):
    """All tensors, in the order of packing."""

    embedding: Linear
    layer_inputs: InputsTensors | None
    layers: tuple[LayerTensors, ...]
    final_norm: Norm
    head: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One decoder-only transformer.

    eos_token_ids      of config.json; other files may add ids
    block_bytes        memory of each matrix in GGUF blocks, by tensor name
    has_head           False for an embedding model without lm_head; `tie_word_embeddings` is then True
    embedding_scale    factor of embeddings, rounded to the activations' dtype
    norm_offset        added to each stored norm weight; the sum is float32
    logit_softcap      see `soft_cap`
    text_part_of       class of the whole model, if only its text part is served
    logits_scaling     divisor of the logits
    num_position_dims  see `AttentionBatch.rotary_positions`
    share              this rank's share, or None
    whole              the undivided model, if `share` is set
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
    share: Share | None = None
    whole: Architecture | None = None

    def split(self, share: Share) -> Architecture:
        """Return a rank's share. Raises `ConfigError` if that is impossible."""
        if share.divides_by_expert and not any(isinstance(each.mlp, ExpertsConfig) for each in self.layers):
            raise ConfigError("enable_expert_parallel needs a mixture of experts, but this model has no experts")
        return replace(self, layers=tuple(split_layer(layer, share) for layer in self.layers), share=share, whole=self)

    @property
    def ranks(self) -> list[Architecture]:
        """The shares of all ranks. An undivided model is its only share."""
        if self.whole is None or self.share is None:
            return [self]
        return [self.whole.split(replace(self.share, rank=rank)) for rank in range(self.share.count)]

    def tensors(self) -> ModelTensors:
        """Declare all tensors."""
        wholes = [Linear(((name, self.vocab_size),), self.hidden_size) for name in (_EMBEDDING, _HEAD)]
        vocabulary, head = wholes if self.share is None else map(self.share.rows, wholes)
        return ModelTensors(
            embedding=vocabulary,
            layer_inputs=None if self.embeddings is None else self.embeddings.tensors(self.hidden_size),
            layers=tuple(
                layer.tensors(f"model.layers.{index}", self.hidden_size) for index, layer in enumerate(self.layers)
            ),
            final_norm=Norm("model.norm", self.hidden_size),
            head=None if self.tie_word_embeddings else head,
        )

    def within(self, max_model_len: int) -> Architecture:
        """See `RopeConfig.within`."""
        whole = None if self.whole is None else self.whole.within(max_model_len)
        return replace(self, layers=tuple(layer.within(max_model_len) for layer in self.layers), whole=whole)

    @property
    def attentions(self) -> list[AttentionConfig | LatentAttentionConfig]:
        """Attention layers, without other token mixers."""
        kinds = (AttentionConfig, LatentAttentionConfig)
        return [layer.attention for layer in self.layers if isinstance(layer.attention, kinds)]

    @property
    def embeddings(self) -> PerLayerEmbeddings | None:
        """The layers' common per-layer embeddings."""
        return self.layers[0].embeddings

    @property
    def has_parts(self) -> bool:
        """True if some declared tensors are parts of stored ones."""
        return any(isinstance(each, RowsPart | VectorPart) for each in in_order(self.tensors()))

    @property
    def tables(self) -> list[Table]:
        """Tables, read row by row."""
        return [each for each in in_order(self.tensors()) if isinstance(each, Table)]

    @property
    def num_parameters(self) -> int:
        """Number of weights. Tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def num_active_parameters(self) -> int:
        """Weights used per token."""
        of_tables = sum((each.num_rows - 1) * each.width for each in self.tables)
        return self.num_parameters - self._num_idle_parameters - of_tables

    @property
    def _num_idle_parameters(self) -> int:
        return sum(each.mlp.num_idle_parameters for each in self.layers if isinstance(each.mlp, ExpertsConfig))

    @property
    def attention_share(self) -> float:
        """Cost of attending to a position outside windows, relative to a token's matrix products without lm_head."""
        far = sum(each.num_heads * each.head_dim for each in self.attentions if each.window is None)
        products = sum(math.prod(s) for n, s in self.tensor_shapes().items() if len(s) == 2 and not is_vocabulary(n))
        return 2 * far / (products - self._num_idle_parameters)

    @property
    def kv_layout(self) -> KVLayout:
        """The KV cache's layout."""
        return KVLayout(tuple(layer.attention.cache_spec for layer in self.layers))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return tensor shapes in packing order."""
        return {name: shape for each in in_order(self.tensors()) for name, shape in each.shapes.items()}

    def scale_names(self) -> list[str]:
        """Return scales' tensor names."""
        return [name for name in self.stored_tensors() if name.rpartition(".")[2] in SCALE_NAMES]

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return required and optional tensors of the files."""
        tensors: dict[str, StoredTensor] = {}
        stored, unused = self.stored or self.stored_floats, self._unused_shapes()
        for name, shape in (self.tensor_shapes() | unused).items():
            module, found = name.removesuffix(".weight"), {name: StoredTensor(shape)}
            if len(shape) == 2 and stored is not None and stored.covers(module):
                found = stored.tensors(module, *shape)
            tensors |= (
                {key: each._replace(is_optional=True) for key, each in found.items()} if name in unused else found
            )
        return tensors

    def _unused_shapes(self) -> dict[str, tuple[int, ...]]:
        unused = tuple(
            layer.attention.unused_tensors(f"model.layers.{index}", self.hidden_size)
            for index, layer in enumerate(self.layers)
            if isinstance(layer.attention, AttentionConfig)
        )
        return {name: shape for each in in_order(unused) for name, shape in each.shapes.items()}


def is_vocabulary(tensor_name: str) -> bool:
    """Return True for embeddings, also of layers, and lm_head."""
    return tensor_name.removesuffix(".weight") in {_EMBEDDING, f"{_EMBEDDING}_per_layer", _HEAD}


def is_norm(tensor_name: str) -> bool:
    """Return True for norms."""
    return _NORM.search(tensor_name) is not None


def read_decoder(
    config: ConfigFile, name: str, *, layers: tuple[LayerConfig, ...], max_context_tokens: int
) -> Architecture:
    """Read all families' keys."""
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
    key = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise config.error(key, f"octavo loads {', '.join(DTYPE_BYTES)}")
    return dtype
