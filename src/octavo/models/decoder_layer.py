"""One layer of a decoder: attention and an MLP, and the norms around them, as its family combines them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.models.declared import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.kv_layout import CacheSpec
    from octavo.models.layers import ModelContext


class TokenMixer(Protocol):
    """The first part of a layer: computes each token from the tokens of its sequence up to it (attention, recurrence).

    cache: the views that `CacheSpec.views` returns. Rows are written at `AttentionBatch.slot_mapping` and read through
    `AttentionBatch.block_tables`, both of the layer's KV group. Only steps of models whose layers are all `Attention`
    are captured as graphs, so a batch has no padding here. A row's result must not depend on rows of other
    sequences, nor on how the rows of its own are divided among steps.
    """

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Write what the cache keeps of [num_tokens, hidden]; return what `attend` needs of each token.

        The first dimension of the result is num_tokens: rows that nothing follows are taken out of it after the last
        layer has written.
        """
        ...

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Return [num_rows, hidden] of the rows that `write_kv` returned, or some of them, over the cache."""
        ...


class TokenMixerConfig(Protocol):
    """The numbers of a `TokenMixer`, what it keeps, and the tensors that it takes. Frozen and hashable."""

    @property
    def cache_spec(self) -> CacheSpec:
        """What the cache keeps of the layer."""
        ...

    @property
    def width(self) -> int:
        """The widest that it computes for a token."""
        ...

    def within(self, max_model_len: int) -> TokenMixerConfig:
        """Return the same for sequences of up to so many tokens."""
        ...

    def tensors(self, name: str, hidden_size: int) -> tuple[Any, ...]:
        """Declare the tensors of the mixer of a layer that is called `name` in the checkpoint."""
        ...

    def build(self, context: ModelContext, tensors: Any) -> TokenMixer:
        """Take the tensors that were declared."""
        ...


class MLP(Protocol):
    """The second part of a layer: computes each token without its neighbours."""

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Return [num_tokens, hidden] -> the same shape.

        batch: describes these rows, for an MLP that computes requests differently (adapters by request). A row's result
        must not depend on the other rows.
        """
        ...


class MLPConfig(Protocol):
    """The numbers of an `MLP`, and the tensors that it takes. Frozen and hashable."""

    @property
    def intermediate_size(self) -> int:
        """The widest that it computes for a token."""
        ...

    def tensors(self, name: str, hidden_size: int) -> tuple[Any, ...]:
        """Declare the tensors of the MLP of a layer that is called `name` in the checkpoint."""
        ...

    def build(self, context: ModelContext, tensors: Any) -> MLP:
        """Take the tensors that were declared."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The norms of a layer by their names in the checkpoint; None for one that it has not.

    Those before a part are of what it reads, those after it of what it adds to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class LayerTensors(NamedTuple):
    """What a layer takes from a checkpoint; attention, mlp: as their configurations declare it."""

    before_attention: Norm | None
    attention: tuple[Any, ...]
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: tuple[Any, ...]
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A layer of a model; those that are equal compute the same with other weights.

    attention: `AttentionConfig`, or another way to mix the tokens of a sequence.
    """

    attention: TokenMixerConfig
    mlp: MLPConfig
    norms: LayerNorms = field(default_factory=LayerNorms)
    residual_scale: float = 1.0  # of what each part adds to the residual stream

    def within(self, max_model_len: int) -> LayerConfig:
        """Return the layer for sequences of up to so many tokens."""
        return replace(self, attention=self.attention.within(max_model_len))

    def tensors(self, name: str, hidden_size: int) -> LayerTensors:
        """Declare the tensors of a layer that is called `name` in the checkpoint."""

        def norm(own_name: str | None) -> Norm | None:
            return None if own_name is None else Norm(f"{name}.{own_name}", hidden_size)

        return LayerTensors(
            before_attention=norm(self.norms.before_attention),
            attention=self.attention.tensors(name, hidden_size),
            after_attention=norm(self.norms.after_attention),
            before_mlp=norm(self.norms.before_mlp),
            mlp=self.mlp.tensors(name, hidden_size),
            after_mlp=norm(self.norms.after_mlp),
        )


class DecoderLayer:
    """The sublayers of a layer, and the norms after each of them.

    kv_group: index of the layer's KV group.
    next_norm: the norm of the next layer's input, or the final one; None for no norm.
    """

    __slots__ = ("after_attention", "after_mlp", "attention", "kv_group", "mlp")

    def __init__(
        self, context: ModelContext, config: LayerConfig, tensors: LayerTensors, kv_group: int, next_norm: Norm | None
    ) -> None:
        self.kv_group = kv_group
        self.attention = config.attention.build(context, tensors.attention)
        self.after_attention = ResidualNorm(context, tensors.after_attention, tensors.before_mlp, config.residual_scale)
        self.mlp = config.mlp.build(context, tensors.mlp)
        self.after_mlp = ResidualNorm(context, tensors.after_mlp, next_norm, config.residual_scale)


class ResidualNorm:
    """Adds what a part gives to the residual stream, and normalizes that for the part that comes next.

    added, stream: the weights of both norms; None where what is added, or what the next part reads, is taken as it is.
    scale: of what is added.
    """

    __slots__ = ("add", "added", "eps", "kernels", "scale", "stream")

    def __init__(self, context: ModelContext, added: Norm | None, stream: Norm | None, scale: float) -> None:
        from octavo.kernels.operations.add import add  # noqa: PLC0415 - configurations are read without torch

        self.add = add
        self.kernels = context.kernels
        self.eps = context.architecture.rms_norm_eps
        self.scale = scale
        self.added = context.optional_norm(added)
        self.stream = context.optional_norm(stream)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Return what the next part reads, perhaps `residual`, to which it adds in place. Both [num_tokens, hidden]."""
        if self.added is not None:
            hidden = self.kernels.rms_norm(hidden, self.added, self.eps)
        if self.stream is not None:
            return self.kernels.add_rms_norm(hidden, residual, self.stream, self.eps, self.scale)
        self.add(self.kernels, hidden, residual, self.scale)
        return residual
