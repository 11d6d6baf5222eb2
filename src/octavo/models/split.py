"""Divide a model among ranks, which are the processes that compute it together.

Each matrix is divided along its output features, and each attention head belongs to one rank. So one rank computes an
output value alone, in the order of a single process, and no partial sums are added. Before a product that needs all
features, ranks exchange activations. Tokens are therefore the same for any number of ranks and any number format.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from octavo.errors import ConfigError
from octavo.models.attention import Attention, AttentionConfig, AttentionTensors
from octavo.models.declared import Linear, VectorPart
from octavo.models.experts import ExpertsConfig, ExpertsTensors
from octavo.models.gated_mlp import GatedMLPConfig, GatedMLPTensors
from octavo.models.kv_layout import KVShape
from octavo.models.latent_attention import LatentAttentionConfig, LatentAttentionTensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from octavo.kernels.interface import RanksKernels
    from octavo.models.decoder_layer import LayerConfig
    from octavo.models.layers import ModelContext

_UNIT = 64  # features; borders at multiples of it leave no half-empty panels
Borders = tuple[int, ...]
"""The first index of each rank, then the total."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of `count` ranks. divides_by_expert: each expert belongs to one rank, and is not divided."""

    rank: int
    count: int
    divides_by_expert: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count}{' with own experts' if self.divides_by_expert else ''}"

    def borders(self, size: int, unit: int = _UNIT, what: str = "features in a layer") -> Borders:
        """Divide `size` as equally as multiples of `unit` allow. Rank 0 has the largest part.

        Halves `unit` if there are too few of them. Raises `ConfigError` if a rank would have nothing.
        """
        if size < self.count:
            raise ConfigError(f"tensor_parallel_size {self.count} is more than {size}, the model's {what}")
        while unit > 1 and size < unit * self.count:
            unit //= 2
        units = -(-size // unit)
        return tuple(min(size, unit * -(-units * rank // self.count)) for rank in range(self.count + 1))

    def own(self, borders: Borders) -> tuple[int, int]:
        """Return this rank's first and end index."""
        return borders[self.rank], borders[self.rank + 1]

    def rows(self, whole: Linear, *, inputs: Borders | None = None, is_joined: bool = True) -> RowsPart:
        """Divide a matrix. is_joined: True if all ranks need the result."""
        borders = self.borders(whole.out_features)
        return RowsPart.of(whole, [self.own(borders)], inputs=inputs, outputs=borders if is_joined else None)

    def mlp(self, whole: GatedMLPTensors, *, is_joined: bool = True) -> GatedMLPTensors:
        """Divide an MLP along its inner features. is_joined: see `rows`."""
        inner = whole.down.in_features
        borders = self.borders(inner)
        first, end = self.own(borders)
        return GatedMLPTensors(
            gate_up=RowsPart.of(whole.gate_up, [(first, end), (inner + first, inner + end)]),
            down=self.rows(whole.down, inputs=borders, is_joined=is_joined),
        )

    def experts(self, num_experts: int) -> Borders:
        """Return each rank's first expert, then their number. Each rank has a node of the tree of `add_experts`.

        Raises `ConfigError` if the number of ranks is no power of two, or if there are fewer experts.
        """
        if self.count & (self.count - 1) or self.count > num_experts:
            raise ConfigError(
                f"enable_expert_parallel divides {num_experts} experts by halving: set tensor_parallel_size to a power "
                f"of two up to {num_experts}, not to {self.count}"
            )
        borders = [0, num_experts]
        while len(borders) <= self.count:
            borders = [*(each for a, b in pairwise(borders) for each in (a, (a + b) // 2)), num_experts]
        return tuple(borders)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Borders, list[tuple[int, int]]]:
        """Return the borders of query heads, and the range of KV heads of each rank.

        If there are fewer KV heads than ranks, several ranks have the same KV head. Raises `ConfigError`.
        """
        group, count = num_heads // num_kv_heads, self.count
        if num_kv_heads >= count:
            kv = self.borders(num_kv_heads, 1)
            return tuple(group * border for border in kv), list(pairwise(kv))
        together = count // num_kv_heads
        if count % num_kv_heads or together > group:
            raise ConfigError(
                f"tensor_parallel_size {count} does not suit a model with {num_heads} query heads and {num_kv_heads} "
                f"heads of keys and values: choose a number up to {num_kv_heads}, or a multiple of it up to {num_heads}"
            )
        kv_heads = [rank // together for rank in range(count)]
        queries = (group * head - (-group * (rank % together) // together) for rank, head in enumerate(kv_heads))
        return (*queries, num_heads), [(head, head + 1) for head in kv_heads]


@dataclass(frozen=True, slots=True)
class RowsPart(Linear):
    """One rank's rows of stored matrices.

    ranges   first and end row of each piece, over all stored matrices as one
    inputs   borders of the input, if it is divided
    outputs  borders of the result, if all ranks need it
    """

    whole: Linear = field(kw_only=True)
    ranges: tuple[tuple[int, int], ...] = field(kw_only=True)
    inputs: Borders | None = field(default=None, kw_only=True)
    outputs: Borders | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        whole: Linear,
        ranges: list[tuple[int, int]],
        *,
        inputs: Borders | None = None,
        outputs: Borders | None = None,
    ) -> RowsPart:
        """Take rows of `whole`. No range crosses the border of two stored matrices."""
        pieces = _pieces(whole, ranges)
        return cls(
            tuple((name, sum(each.stop - each.start for each in pieces[name])) for name in whole.names),
            whole.in_features,
            whole.has_bias,
            whole=whole,
            ranges=tuple(ranges),
            inputs=inputs,
            outputs=outputs,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored matrices."""
        return self.whole.shapes

    @property
    def num_weights(self) -> int:
        """See `Linear`."""
        return self.out_features * (self.in_features + self.has_bias)

    def pieces(self) -> dict[str, list[slice]]:
        """Return the rows of each stored matrix."""
        return _pieces(self.whole, self.ranges)


def _pieces(whole: Linear, ranges: Iterable[tuple[int, int]]) -> dict[str, list[slice]]:
    pieces: dict[str, list[slice]] = {}
    start = 0
    for name, rows in whole.parts:
        pieces[name] = [slice(a - start, b - start) for a, b in ranges if start <= a < start + rows]
        start += rows
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAttention(AttentionConfig):
    """One rank's heads of an `AttentionConfig`."""

    whole: AttentionConfig
    share: Share

    @classmethod
    def of(cls, whole: AttentionConfig, share: Share) -> SplitAttention:
        """Take the rank's heads. Raises `ConfigError`."""
        queries, kv = share.heads(whole.num_heads, whole.num_kv_heads)
        first, end = share.own(queries)
        options = {name: getattr(whole, name) for name in AttentionConfig.__dataclass_fields__}
        options |= {"num_heads": end - first, "num_kv_heads": kv[share.rank][1] - kv[share.rank][0]}
        return cls(**options, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> AttentionTensors:
        """See `TokenMixerConfig`."""
        whole, share = self.whole.tensors(name, hidden_size), self.share
        queries, kv = share.heads(self.whole.num_heads, self.whole.num_kv_heads)
        own = [
            (self.head_dim * first, self.head_dim * end)
            for first, end in (share.own(queries), kv[share.rank], kv[share.rank])
        ]
        if self.qk_norm == "width":
            own[:2] = map(share.own, self.normed_borders)
        q_rows, kv_rows = self.head_dim * self.whole.num_heads, self.head_dim * self.whole.num_kv_heads
        starts = (0, q_rows, q_rows + kv_rows)[: self.num_projections]
        ranges = [(start + first, start + end) for start, (first, end) in zip(starts, own, strict=False)]
        inputs, sinks = tuple(self.head_dim * border for border in queries), whole.sinks
        if sinks is not None:
            first, end = share.own(queries)
            sinks = VectorPart(sinks.name, end - first, first=first, whole_size=sinks.size)
        return whole._replace(
            qkv=RowsPart.of(whole.qkv, ranges),
            o=share.rows(whole.o, inputs=inputs),
            sinks=sinks,
        )

    @property
    def cache_spec(self) -> KVShape:
        """See `TokenMixerConfig`."""
        _, kv = self.share.heads(self.whole.num_heads, self.whole.num_kv_heads)
        return KVShape(self.num_kv_heads, self.head_dim, self.window, self.shared_layer, kv[self.share.rank][0])

    @property
    def normed_borders(self) -> tuple[Borders, Borders]:
        """Borders of the queries' and keys' features, if a norm covers all heads."""
        heads = self.whole.num_heads, self.whole.num_kv_heads
        queries, keys = (self.share.borders(self.head_dim * count, what="features of heads") for count in heads)
        return queries, keys

    def build(self, context: ModelContext, tensors: AttentionTensors) -> Attention:
        """See `TokenMixerConfig`."""
        return (Attention if self.qk_norm != "width" else _NormedHeads)(context, self, tensors)


class _NormedHeads(Attention):
    """One rank's heads, if a norm covers the heads of all ranks. Ranks exchange queries and keys before it."""

    __slots__ = ()

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        assert isinstance(self.config, SplitAttention)
        assert self.q_norm is not None
        assert self.k_norm is not None
        assert self.v_norm is None
        assert not self.config.is_shared
        assert not self.config.values_are_keys
        config, share, kernels = self.config, self.config.share, cast("RanksKernels", self.kernels)
        borders = config.normed_borders
        sizes = [end - first for first, end in map(share.own, borders)]
        qkv = kernels.linear(hidden, self.qkv)
        *parts, values = qkv.split_with_sizes((*sizes, config.head_dim * config.num_kv_heads), dim=1)
        queries, kv = share.heads(config.whole.num_heads, config.whole.num_kv_heads)
        normed = []
        for part, of_part, weight, (first, end) in zip(
            parts, borders, (self.q_norm, self.k_norm), (share.own(queries), kv[share.rank]), strict=True
        ):
            rows = kernels.rms_norm(kernels.join(part, of_part).unsqueeze(1), weight, self.eps)
            normed.append(rows.view(len(qkv), -1, config.head_dim)[:, first:end])
        q, k = normed
        return q, k, values.view(len(qkv), config.num_kv_heads, config.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMLP(GatedMLPConfig):
    """One rank's features of a `GatedMLPConfig`."""

    whole: GatedMLPConfig
    share: Share

    @classmethod
    def of(cls, whole: GatedMLPConfig, share: Share) -> SplitMLP:
        """Take the rank's features."""
        first, end = share.own(share.borders(whole.intermediate_size))
        options = {name: getattr(whole, name) for name in GatedMLPConfig.__dataclass_fields__}
        return cls(**options | {"intermediate_size": end - first}, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> GatedMLPTensors:
        """See `MLPConfig`."""
        return self.share.mlp(self.whole.tensors(name, hidden_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLatentAttention(LatentAttentionConfig):
    """One rank's heads of a `LatentAttentionConfig`. Every rank computes and stores all latents."""

    whole: LatentAttentionConfig
    share: Share

    @classmethod
    def of(cls, whole: LatentAttentionConfig, share: Share) -> SplitLatentAttention:
        """Take the rank's heads. Raises `ConfigError`."""
        first, end = share.own(share.borders(whole.num_heads, 1, "attention heads"))
        options = {name: getattr(whole, name) for name in LatentAttentionConfig.__dataclass_fields__}
        return cls(**options | {"num_heads": end - first}, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> LatentAttentionTensors:
        """See `TokenMixerConfig`."""
        whole, share = self.whole.tensors(name, hidden_size), self.share
        heads = share.borders(self.whole.num_heads, 1)
        first, end = share.own(heads)
        width = self.nope_dim + self.rope_dim
        queries, down, q_b = (width * first, width * end), whole.down, whole.q_b
        if q_b is None:
            num_queries = width * self.whole.num_heads
            down = RowsPart.of(down, [queries, (num_queries, num_queries + self.head_dim)])
        else:
            q_b = RowsPart.of(q_b, [queries])
        inputs = tuple(self.value_dim * border for border in heads)
        return whole._replace(
            down=down, q_b=q_b, k_b=whole.k_b[first:end], v_b=whole.v_b[first:end], o=share.rows(whole.o, inputs=inputs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts(ExpertsConfig):
    """One rank's features of every expert of an `ExpertsConfig`, or its experts. Every rank chooses for all tokens."""

    whole: ExpertsConfig
    share: Share

    @classmethod
    def of(cls, whole: ExpertsConfig, share: Share) -> SplitExperts:
        """Take the rank's features or experts. Raises `ConfigError`."""
        if share.divides_by_expert:
            share.experts(whole.router.num_experts)
        options = {name: getattr(whole, name) for name in ExpertsConfig.__dataclass_fields__}
        return cls(**options, whole=whole, share=share)

    @property
    def outputs(self) -> Borders:
        """See `SplitLinear`."""
        return self.share.borders(self.hidden_size)

    @property
    def expert_borders(self) -> Borders | None:
        """See `ExpertsConfig`."""
        return self.share.experts(self.router.num_experts) if self.share.divides_by_expert else None

    @property
    def own_experts(self) -> tuple[int, int]:
        """See `ExpertsConfig`."""
        borders = self.expert_borders
        return (0, self.router.num_experts) if borders is None else self.share.own(borders)

    def tensors(self, name: str, hidden_size: int) -> ExpertsTensors:
        """See `MLPConfig`."""
        whole, share = self.whole.tensors(name, hidden_size), self.share
        own = slice(*self.own_experts)
        experts = [GatedMLPTensors(*each) for each in zip(whole.gate_up[own], whole.down[own], strict=True)]
        if not share.divides_by_expert:
            experts = [share.mlp(each, is_joined=False) for each in experts]
        shared = whole.shared
        if shared is not None:  # in a branch of its own, the shared expert is an MLP
            shared = share.mlp(shared, is_joined=self.branches is not None)
        return whole._replace(
            gate_up=tuple(each.gate_up for each in experts),
            down=tuple(each.down for each in experts),
            shared=shared,
        )


def split_layer(layer: LayerConfig, share: Share) -> LayerConfig:
    """Take a rank's share of a layer. Raises `ConfigError` if the layer cannot be divided."""
    parts: list[Any] = []
    for whole in (layer.attention, layer.mlp):
        kind: Any = _KINDS.get(type(whole))
        if kind is None:
            raise ConfigError(f"tensor_parallel_size above 1 does not support {type(whole).__name__}")
        parts.append(kind.of(whole, share))
    return replace(layer, attention=parts[0], mlp=parts[1])


_KINDS: dict[type, type] = {
    AttentionConfig: SplitAttention,
    LatentAttentionConfig: SplitLatentAttention,
    GatedMLPConfig: SplitMLP,
    ExpertsConfig: SplitExperts,
}
