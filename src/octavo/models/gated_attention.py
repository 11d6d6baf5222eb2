"""Attention whose output is multiplied by a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models.attention import AttentionConfig, AttentionTensors
from octavo.models.declared import Linear, RowsPart

if TYPE_CHECKING:
    from octavo.models.gated_attention_layer import GatedAttention
    from octavo.models.layers import ModelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttentionConfig(AttentionConfig):
    """`AttentionConfig` with a gate for each feature of the output. The queries' matrix has query and gate by head."""

    @classmethod
    def of(cls, plain: AttentionConfig) -> GatedAttentionConfig:
        """Add the gate."""
        return cls(**{name: getattr(plain, name) for name in AttentionConfig.__dataclass_fields__})

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def tensors(self, name: str, hidden_size: int) -> AttentionTensors:
        """See `TokenMixerConfig`. The rows of `qkv` are queries, gates, keys, values."""
        plain = AttentionConfig.tensors(self, name, hidden_size)
        (query, q_rows), *others = plain.qkv.parts
        whole = Linear(((query, 2 * q_rows), *others), hidden_size, self.qkv_bias)
        size = self.head_dim
        starts = range(0, 2 * q_rows, 2 * size)
        ranges = [(start, start + size) for start in starts] + [(start + size, start + 2 * size) for start in starts]
        ranges.append((2 * q_rows, whole.out_features - others[1][1]))
        ranges.append((whole.out_features - others[1][1], whole.out_features))
        return plain._replace(qkv=RowsPart.of(whole, ranges))

    def build(self, context: ModelContext, tensors: AttentionTensors) -> GatedAttention:
        """See `TokenMixerConfig`."""
        from octavo.models.gated_attention_layer import GatedAttention  # noqa: PLC0415

        return GatedAttention(context, self, tensors)
