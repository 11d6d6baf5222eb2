"""Divide recurrent layers among ranks: by heads, or by channels if there are no heads.

A rank has the states of its heads, and its channels of the convolution. Ranks exchange the inputs of the last matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models.declared import RowsPart, VectorPart
from octavo.models.gated_conv import GatedConvConfig, GatedConvTensors
from octavo.models.gated_delta import GatedDeltaConfig, GatedDeltaTensors

if TYPE_CHECKING:
    from octavo.models.share import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGatedDelta(GatedDeltaConfig):
    """One rank's heads of a `GatedDeltaConfig`. If there are fewer key heads than ranks, ranks share key heads."""

    whole: GatedDeltaConfig
    share: Share

    @classmethod
    def of(cls, whole: GatedDeltaConfig, share: Share) -> SplitGatedDelta:
        """Take the rank's heads. Raises `ConfigError`."""
        values, keys = share.heads(whole.num_value_heads, whole.num_key_heads, ("value heads", "key heads"))
        (first, end), (first_key, end_key) = share.own(values), keys[share.rank]
        options = {name: getattr(whole, name) for name in GatedDeltaConfig.__dataclass_fields__}
        options |= {"num_value_heads": end - first, "num_key_heads": end_key - first_key}
        return cls(**options, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> GatedDeltaTensors:
        """See `TokenMixerConfig`."""
        whole, share, config = self.whole.tensors(name, hidden_size), self.share, self.whole
        borders, key_heads = share.heads(config.num_value_heads, config.num_key_heads)
        heads, num_keys = share.own(borders), config.num_key_heads * config.key_dim
        keys, values = _times(config.key_dim, key_heads[share.rank]), _times(config.value_dim, heads)
        channels = [keys, _after(num_keys, keys), _after(2 * num_keys, values)]
        return whole._replace(
            inputs=RowsPart.of(whole.inputs, [*channels, _after(config.num_channels, values)]),
            rates=RowsPart.of(whole.rates, [heads, _after(config.num_value_heads, heads)]),
            conv=VectorPart.of(whole.conv, channels),
            decay=VectorPart.of(whole.decay, [heads]),
            dt_bias=VectorPart.of(whole.dt_bias, [heads]),
            out=share.rows(whole.out, inputs=tuple(config.value_dim * border for border in borders)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGatedConv(GatedConvConfig):
    """One rank's channels of a `GatedConvConfig`."""

    whole: GatedConvConfig
    share: Share

    @classmethod
    def of(cls, whole: GatedConvConfig, share: Share) -> SplitGatedConv:
        """Take the rank's channels. Raises `ConfigError`."""
        first, end = share.own(share.borders(whole.num_channels))
        options = {name: getattr(whole, name) for name in GatedConvConfig.__dataclass_fields__}
        return cls(**options | {"num_channels": end - first}, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> GatedConvTensors:
        """See `TokenMixerConfig`."""
        whole, share, size = self.whole.tensors(name, hidden_size), self.share, self.whole.num_channels
        borders = share.borders(size)
        own, bias = share.own(borders), whole.conv_bias
        return whole._replace(
            inputs=RowsPart.of(whole.inputs, [own, _after(size, own), _after(2 * size, own)]),
            conv=VectorPart.of(whole.conv, [own]),
            conv_bias=None if bias is None else VectorPart.of(bias, [own]),
            out=share.rows(whole.out, inputs=borders),
        )


def _times(factor: int, heads: tuple[int, int]) -> tuple[int, int]:
    first, end = heads
    return factor * first, factor * end


def _after(start: int, rows: tuple[int, int]) -> tuple[int, int]:
    first, end = rows
    return start + first, start + end
