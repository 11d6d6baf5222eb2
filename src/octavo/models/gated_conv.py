"""Gated short convolutions (Liquid AI, "LFM2 Technical Report", 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear, Taps, Vector
from octavo.models.kv_layout import StateShape
from octavo.models.short_conv import read_num_taps

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.declared import Ranges
    from octavo.models.gated_conv_layer import GatedConv
    from octavo.models.layers import ModelContext


class GatedConvTensors(NamedTuple):
    """A layer's tensors. inputs: the gate before the convolution, the gate after it, and the values."""

    inputs: Linear
    conv: Vector
    conv_bias: Vector | None
    out: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConvConfig:
    """out(gate_after * convolution(gate_before * values)).

    num_channels  width of the gates and the values
    num_taps      width of the convolution
    bias          of the convolution and both linear layers
    """

    num_channels: int
    num_taps: int
    bias: bool = False

    @classmethod
    def read(cls, config: ConfigFile) -> GatedConvConfig:
        """Read the sizes."""
        num_taps, bias = read_num_taps(config, "conv_L_cache", 3), config.flag("conv_bias", default=False)
        return cls(num_channels=config.count("hidden_size"), num_taps=num_taps, bias=bias)

    def within(self, max_model_len: int) -> GatedConvConfig:
        """See `TokenMixerConfig`."""
        del max_model_len
        return self

    @property
    def cache_spec(self) -> StateShape:
        """See `TokenMixerConfig`."""
        return StateShape(((self.num_taps - 1, self.num_channels),), (), self.num_channels, self.channels)

    @property
    def channels(self) -> Ranges:
        """The channels, among those of the model."""
        return ((0, self.num_channels),)

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 4 * self.num_channels

    def tensors(self, name: str, hidden_size: int) -> GatedConvTensors:
        """See `TokenMixerConfig`."""
        name, channels = f"{name}.conv", self.num_channels
        return GatedConvTensors(
            inputs=Linear(((f"{name}.in_proj", 3 * channels),), hidden_size, self.bias),
            conv=Taps(f"{name}.conv.weight", channels * self.num_taps, self.num_taps),
            conv_bias=Vector(f"{name}.conv.bias", channels) if self.bias else None,
            out=Linear(((f"{name}.out_proj", hidden_size),), channels, self.bias),
        )

    def build(self, context: ModelContext, tensors: GatedConvTensors) -> GatedConv:
        """See `TokenMixerConfig`."""
        from octavo.models.gated_conv_layer import GatedConv  # noqa: PLC0415

        return GatedConv(context, self, tensors)
