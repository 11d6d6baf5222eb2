"""Divide attention among ranks by heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from octavo.models.attention import Attention, AttentionConfig, AttentionTensors
from octavo.models.declared import RowsPart, VectorPart
from octavo.models.kv_layout import KVShape
from octavo.models.latent_attention import LatentAttentionConfig, LatentAttentionTensors

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import RanksKernels
    from octavo.models.declared import Borders
    from octavo.models.gated_attention_layer import GatedAttention
    from octavo.models.layers import ModelContext
    from octavo.models.share import Share


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
            sinks = VectorPart.of(sinks, [share.own(queries)])
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
class SplitGatedAttention(SplitAttention):
    """One rank's heads of a `GatedAttentionConfig`."""

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def tensors(self, name: str, hidden_size: int) -> AttentionTensors:
        """See `TokenMixerConfig`. The rows of `qkv` are the rank's queries, gates, keys, values."""
        whole, share, size = self.whole.tensors(name, hidden_size), self.share, self.head_dim
        num_heads, num_kv_heads = self.whole.num_heads, self.whole.num_kv_heads
        queries, kv = share.heads(num_heads, num_kv_heads)
        own, own_kv = share.own(queries), kv[share.rank]
        starts = {0: own, num_heads: own, 2 * num_heads: own_kv, 2 * num_heads + num_kv_heads: own_kv}
        ranges = [(size * (start + first), size * (start + end)) for start, (first, end) in starts.items()]
        inputs = tuple(size * border for border in queries)
        return whole._replace(qkv=RowsPart.of(whole.qkv, ranges), o=share.rows(whole.o, inputs=inputs))

    def build(self, context: ModelContext, tensors: AttentionTensors) -> GatedAttention:
        """See `TokenMixerConfig`."""
        from octavo.models.gated_attention_layer import GatedAttention  # noqa: PLC0415

        return GatedAttention(context, self, tensors)


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
