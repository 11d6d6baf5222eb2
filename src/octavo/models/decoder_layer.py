"""One layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.models.declared import Norm, Vector
from octavo.models.no_sublayer import NoSublayer, Unchanged

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.kv_layout import CacheSpec
    from octavo.models.layers import ModelContext
    from octavo.models.per_layer_embeddings import InputTensors, PerLayerEmbeddings


class TokenMixer(Protocol):
    """The first sublayer, which reads a token and earlier tokens of its sequence.

    `cache` comes from `CacheSpec.views`. Rows are written at `AttentionBatch.slot_mapping` and read through
    `AttentionBatch.block_tables` of the layer's KV group. Results must not depend on other sequences, or on how a
    sequence is divided among steps. Only `Attention` and `LatentAttention` are captured as graphs, so other mixers get
    no padding.
    """

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Write tokens [num_tokens, hidden] into the cache. Return the input [num_tokens, ...] of `attend`.

        From the last layer that writes KV on, `attend` gets only rows that need an output.
        """
        ...

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Return the output [num_rows, hidden] of rows of `write_kv`."""
        ...


class TokenMixerConfig(Protocol):
    """Frozen, hashable parameters of a `TokenMixer`."""

    @property
    def cache_spec(self) -> CacheSpec:
        """The layer's part of the cache."""
        ...

    @property
    def width(self) -> int:
        """Largest number of values per token."""
        ...

    def within(self, max_model_len: int) -> TokenMixerConfig:
        """See `RopeConfig.within`."""
        ...

    def tensors(self, name: str, hidden_size: int) -> tuple[Any, ...]:
        """Declare the tensors of layer `name`."""
        ...

    def build(self, context: ModelContext, tensors: Any) -> TokenMixer:
        """Build the mixer."""
        ...


class MLP(Protocol):
    """The second sublayer: computes each token independently."""

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Map [num_tokens, hidden] to the same shape. batch: for differences between requests, such as adapters."""
        ...


class MLPConfig(Protocol):
    """Frozen, hashable parameters of an `MLP`."""

    @property
    def intermediate_size(self) -> int:
        """See `TokenMixerConfig.width`."""
        ...

    def tensors(self, name: str, hidden_size: int) -> tuple[Any, ...]:
        """See `TokenMixerConfig`."""
        ...

    def build(self, context: ModelContext, tensors: Any) -> MLP:
        """Build the MLP."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Names of a layer's pre-norms and post-norms."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class LayerTensors(NamedTuple):
    """One layer's tensors."""

    before_attention: Norm | None
    attention: tuple[Any, ...]
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: tuple[Any, ...]
    after_mlp: Norm | None
    embedding: InputTensors | None
    stream_scale: Vector | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer without weights. One of its sublayers may be `NoSublayer`.

    embeddings: added after the MLP. stream_scale: finally multiply the residual stream by a stored number.
    """

    attention: TokenMixerConfig
    mlp: MLPConfig
    norms: LayerNorms = field(default_factory=LayerNorms)
    residual_scale: float = 1.0
    embeddings: PerLayerEmbeddings | None = None
    stream_scale: bool = False

    def within(self, max_model_len: int) -> LayerConfig:
        """See `RopeConfig.within`."""
        return replace(self, attention=self.attention.within(max_model_len))

    def tensors(self, name: str, hidden_size: int) -> LayerTensors:
        """Declare all tensors."""

        def norm(norm_name: str | None) -> Norm | None:
            return None if norm_name is None else Norm(f"{name}.{norm_name}", hidden_size)

        return LayerTensors(
            before_attention=norm(self.norms.before_attention),
            attention=self.attention.tensors(name, hidden_size),
            after_attention=norm(self.norms.after_attention),
            before_mlp=norm(self.norms.before_mlp),
            mlp=self.mlp.tensors(name, hidden_size),
            after_mlp=norm(self.norms.after_mlp),
            embedding=None if self.embeddings is None else self.embeddings.layer_tensors(name, hidden_size),
            stream_scale=Vector(f"{name}.layer_scalar", 1) if self.stream_scale else None,
        )


class DecoderLayer:
    """One layer's sublayers, and the norm after each."""

    __slots__ = ("after_attention", "after_embedding", "after_mlp", "attention", "embedding", "kv_group", "mlp")

    def __init__(
        self, context: ModelContext, config: LayerConfig, tensors: LayerTensors, kv_group: int, next_norm: Norm | None
    ) -> None:
        scale, embedding = config.residual_scale, tensors.embedding
        self.kv_group = kv_group
        self.attention = config.attention.build(context, tensors.attention)
        has_mixer, has_mlp = (not isinstance(each, NoSublayer) for each in (config.attention, config.mlp))
        stream = tensors.before_mlp if has_mlp else next_norm
        after_attention = ResidualNorm(context, tensors.after_attention, stream, scale) if has_mixer else Unchanged()
        self.after_attention: ResidualNorm | Unchanged = after_attention
        self.after_mlp: ResidualNorm | Unchanged
        self.mlp = config.mlp.build(context, tensors.mlp)
        stream_scale = 1.0 if tensors.stream_scale is None else context.vector(tensors.stream_scale).item()
        last = (next_norm, scale, stream_scale)
        self.embedding = self.after_embedding = None
        if not has_mlp:
            self.after_mlp = Unchanged()
        elif config.embeddings is None or embedding is None:
            self.after_mlp = ResidualNorm(context, tensors.after_mlp, *last)
        else:
            self.after_mlp = ResidualNorm(context, tensors.after_mlp, None, scale)
            self.embedding = config.embeddings.build_layer(context, embedding)
            self.after_embedding = ResidualNorm(context, embedding.norm, *last)

    def finish(self, hidden: Tensor, residual: Tensor, batch: AttentionBatch, inputs: Tensor | None) -> Tensor:
        """Map attention's output to the next layer's input.

        inputs [num_tokens, width]: see `PerLayerEmbeddings`.
        """
        hidden = self.after_attention.forward(hidden, residual)
        hidden = self.after_mlp.forward(self.mlp.forward(hidden, batch), residual)
        if self.embedding is None or self.after_embedding is None:
            return hidden
        assert inputs is not None
        return self.after_embedding.forward(self.embedding.forward(hidden, inputs), residual)


class ResidualNorm:
    """Adds a sublayer's output to the residual stream, and normalizes the sum.

    added: the output's norm. stream: the sum's norm. stream_scale: the sum's factor.
    """

    __slots__ = ("add", "added", "eps", "kernels", "scale", "stream", "stream_scale")

    def __init__(
        self, context: ModelContext, added: Norm | None, stream: Norm | None, scale: float, stream_scale: float = 1.0
    ) -> None:
        from octavo.kernels.operations.add import add  # noqa: PLC0415

        self.add = add
        self.kernels = context.kernels
        self.eps = context.architecture.rms_norm_eps
        self.scale, self.stream_scale = scale * stream_scale, stream_scale
        self.added = context.optional_norm(added)
        self.stream = context.optional_norm(stream)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Update `residual` in place. Return the next sublayer's input [num_tokens, hidden], or `residual` itself."""
        if self.added is not None:
            hidden = self.kernels.rms_norm(hidden, self.added, self.eps)
        if self.stream_scale != 1.0:
            # residual * stream_scale
            self.add(self.kernels, residual, residual, self.stream_scale - 1.0)
        if self.stream is not None:
            return self.kernels.add_rms_norm(hidden, residual, self.stream, self.eps, self.scale)
        self.add(self.kernels, hidden, residual, self.scale)
        return residual
