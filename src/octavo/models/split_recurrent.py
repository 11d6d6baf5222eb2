"""Divide recurrent layers among ranks: by heads, or by channels if there are no heads.

A rank has the states of its heads, and its channels of the convolution. Ranks exchange the inputs of the last matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models.declared import RowsPart, VectorPart
from octavo.models.gated_conv import GatedConvConfig, GatedConvTensors
from octavo.models.gated_delta import GatedDeltaConfig, GatedDeltaTensors
from octavo.models.mamba2 import Mamba2Config, Mamba2Tensors

if TYPE_CHECKING:
    from octavo.models.declared import Borders, Ranges
    from octavo.models.share import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGatedDelta(GatedDeltaConfig):
    """One rank's value heads of a `GatedDeltaConfig`, and their key heads, of which other ranks may have some, too."""

    whole: GatedDeltaConfig
    share: Share

    @classmethod
    def of(cls, whole: GatedDeltaConfig, share: Share) -> SplitGatedDelta:
        """Take the rank's heads. Raises `ConfigError`."""
        borders, key_heads = _divide_heads(whole, share)
        first, end = share.own(borders)
        options = {name: getattr(whole, name) for name in GatedDeltaConfig.__dataclass_fields__}
        options |= {"num_value_heads": end - first, "num_key_heads": sum(end - first for first, end in key_heads)}
        return cls(**options, whole=whole, share=share)

    @property
    def channels(self) -> Ranges:
        """See `GatedDeltaConfig`."""
        config, num_keys = self.whole, self.whole.num_key_heads * self.whole.key_dim
        borders, key_heads = _divide_heads(config, self.share)
        values = _times(config.value_dim, self.share.own(borders))
        keys = [_times(config.key_dim, each) for each in key_heads]
        return (*keys, *(_after(num_keys, each) for each in keys), _after(2 * num_keys, values))

    @property
    def first_head(self) -> int:
        """See `GatedDeltaConfig`."""
        borders, _ = _divide_heads(self.whole, self.share)
        return borders[self.share.rank]

    def tensors(self, name: str, hidden_size: int) -> GatedDeltaTensors:
        """See `TokenMixerConfig`."""
        whole, share, config, channels = self.whole.tensors(name, hidden_size), self.share, self.whole, self.channels
        borders, _ = _divide_heads(config, share)
        heads = share.own(borders)
        values = _after(config.num_channels, _times(config.value_dim, heads))
        return whole._replace(
            inputs=RowsPart.of(whole.inputs, [*channels, values]),
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

    @property
    def channels(self) -> Ranges:
        """See `GatedConvConfig`."""
        return (self.share.own(self.share.borders(self.whole.num_channels)),)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMamba2(Mamba2Config):
    """One rank's heads of a `Mamba2Config`. If there are fewer groups than ranks, several ranks have the same group."""

    whole: Mamba2Config
    share: Share

    @classmethod
    def of(cls, whole: Mamba2Config, share: Share) -> SplitMamba2:
        """Take the rank's heads. Raises `ConfigError`."""
        borders, groups = share.heads(whole.num_heads, whole.num_groups, ("heads", "groups of heads"))
        (first, end), (first_group, end_group) = share.own(borders), groups[share.rank]
        options = {name: getattr(whole, name) for name in Mamba2Config.__dataclass_fields__}
        options |= {"num_heads": end - first, "num_groups": end_group - first_group}
        return cls(**options, whole=whole, share=share)

    @property
    def norm_size(self) -> int:
        """See `Mamba2Config`."""
        return self.whole.norm_size

    @property
    def joined_values(self) -> Borders | None:
        """See `Mamba2Config`."""
        return self._value_borders if self.whole.num_groups < self.share.count else None

    @property
    def _value_borders(self) -> Borders:
        borders, _ = self.share.heads(self.whole.num_heads, self.whole.num_groups)
        return tuple(self.head_dim * border for border in borders)

    @property
    def channels(self) -> Ranges:
        """See `Mamba2Config`."""
        config, share = self.whole, self.share
        borders, groups = share.heads(config.num_heads, config.num_groups)
        group = _after(config.num_values, _times(config.state_size, groups[share.rank]))
        values = _times(config.head_dim, share.own(borders))
        return values, group, _after(config.num_groups * config.state_size, group)

    @property
    def first_head(self) -> int:
        """See `Mamba2Config`."""
        borders, _ = self.share.heads(self.whole.num_heads, self.whole.num_groups)
        return borders[self.share.rank]

    def tensors(self, name: str, hidden_size: int) -> Mamba2Tensors:
        """See `TokenMixerConfig`."""
        whole, share, config, channels = self.whole.tensors(name, hidden_size), self.share, self.whole, self.channels
        borders, _ = share.heads(config.num_heads, config.num_groups)
        heads, num_values, is_joined = share.own(borders), config.num_values, self.joined_values is not None
        values = _times(config.head_dim, heads)
        inputs = [values, *(_after(num_values, each) for each in channels)]
        return whole._replace(
            inputs=RowsPart.of(whole.inputs, [*inputs, _after(num_values + config.num_channels, heads)]),
            conv=VectorPart.of(whole.conv, channels),
            conv_bias=None if whole.conv_bias is None else VectorPart.of(whole.conv_bias, channels),
            dt_bias=VectorPart.of(whole.dt_bias, [heads]),
            decay=VectorPart.of(whole.decay, [heads]),
            skip=VectorPart.of(whole.skip, [heads]),
            norm=whole.norm if is_joined else VectorPart.of(whole.norm, [values]),
            out=share.rows(whole.out, inputs=None if is_joined else self._value_borders),
        )


def _divide_heads(whole: GatedDeltaConfig, share: Share) -> tuple[Borders, list[tuple[int, int]]]:
    """Return the borders of value heads, and the ranges of the rank's key heads.

    Value heads of a rank are neighbours. If heads are tiled, the key heads are in the order in which the rank's value
    heads use them, and each value head has its own if they do not use all equally often. Raises `ConfigError`.
    """
    num_keys = whole.num_key_heads
    if not whole.is_tiled:
        borders, key_heads = share.heads(whole.num_value_heads, num_keys, ("value heads", "key heads"))
        return borders, [key_heads[share.rank]]
    borders = share.borders(whole.num_value_heads, 1, "value heads of gated delta nets")
    first, end = share.own(borders)
    used = range(first, end if (end - first) % num_keys else first + num_keys)
    return borders, [(head % num_keys, head % num_keys + 1) for head in used]


def _times(factor: int, heads: tuple[int, int]) -> tuple[int, int]:
    first, end = heads
    return factor * first, factor * end


def _after(start: int, rows: tuple[int, int]) -> tuple[int, int]:
    first, end = rows
    return start + first, start + end
