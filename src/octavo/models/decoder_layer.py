"""One layer of a decoder: attention and an MLP, and the norms around them, as its family combines them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.models.attention import Attention
from octavo.models.declared import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.attention import AttentionConfig, AttentionTensors
    from octavo.models.layers import ModelContext


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
        """Declare the tensors of a layer whose MLP is called `name` in the checkpoint."""
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
    """What a layer takes from a checkpoint; mlp: as its configuration declares it."""

    before_attention: Norm | None
    attention: AttentionTensors
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: tuple[Any, ...]
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A layer of a model; those that are equal compute the same with other weights."""

    attention: AttentionConfig
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
            attention=self.attention.tensors(f"{name}.self_attn", hidden_size),
            after_attention=norm(self.norms.after_attention),
            before_mlp=norm(self.norms.before_mlp),
            mlp=self.mlp.tensors(f"{name}.mlp", hidden_size),
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
        self.attention = Attention(context, config.attention, tensors.attention)
        self.after_attention = ResidualNorm(context, tensors.after_attention, tensors.before_mlp, config.residual_scale)
        self.mlp = config.mlp.build(context, tensors.mlp)
        self.after_mlp = ResidualNorm(context, tensors.after_mlp, next_norm, config.residual_scale)


class ResidualNorm:
    """Adds what a part gives to the residual stream, and normalizes that for the part that comes next.

    added, stream: the weights of both norms; None where what is added, or what the next part reads, is taken as it is.
    scale: of what is added.
    """

    __slots__ = ("added", "eps", "kernels", "scale", "stream")

    def __init__(self, context: ModelContext, added: Norm | None, stream: Norm | None, scale: float) -> None:
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
        self.kernels.add(hidden, residual, self.scale)
        return residual
