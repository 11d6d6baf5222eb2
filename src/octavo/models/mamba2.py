"""Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear, Taps, Vector
from octavo.models.kv_layout import StateShape
from octavo.models.short_conv import read_num_taps

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.declared import Borders, Ranges
    from octavo.models.layers import ModelContext
    from octavo.models.mamba2_layer import Mamba2

_COLUMNS = 16  # octavo.kernels.state_batch


class Mamba2Keys(NamedTuple):
    """Names of a family's keys for the sizes."""

    num_heads: str
    head_dim: str
    state_size: str
    num_groups: str
    num_taps: str


class Mamba2Tensors(NamedTuple):
    """A layer's tensors. inputs: the output's gate, the convolution's channels, and step sizes."""

    inputs: Linear
    conv: Vector
    conv_bias: Vector | None
    dt_bias: Vector
    decay: Vector
    skip: Vector
    norm: Vector
    out: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A layer with a state [state_size, head_dim] for each head, instead of keys and values.

    num_groups        groups of heads with the same B and C, and of the norm
    num_taps          width of the convolution before the heads
    dt_min, dt_max    limits of step sizes
    bias              of `in_proj` and `out_proj`
    decay_is_stored   the checkpoint has the decay itself, and not the logarithm of its negative
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    num_taps: int
    dt_min: float = 0.0
    dt_max: float = math.inf
    bias: bool = False
    conv_bias: bool = True
    decay_is_stored: bool = False

    @classmethod
    def read(cls, config: ConfigFile, keys: Mamba2Keys) -> Mamba2Config:
        """Read the sizes."""
        num_heads, head_dim, state_size, num_groups = map(config.count, keys[:-1])
        if num_heads % num_groups:
            raise config.error(keys.num_groups, f"must divide {keys.num_heads} = {num_heads}")
        if head_dim % _COLUMNS:
            raise config.error(keys.head_dim, f"must be a multiple of {_COLUMNS}, not {head_dim}")
        return cls(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            num_groups=num_groups,
            num_taps=read_num_taps(config, keys.num_taps, 4),
            decay_is_stored=config.flag("decay_is_stored", default=False),
        )

    def within(self, max_model_len: int) -> Mamba2Config:
        """See `TokenMixerConfig`."""
        del max_model_len
        return self

    @property
    def num_values(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def norm_size(self) -> int:
        """Values of a group, which have one norm."""
        return self.num_values // self.num_groups

    @property
    def joined_values(self) -> Borders | None:
        """Borders of the ranks' values, if a group is divided among ranks. They exchange its values before the norm."""
        return None

    @property
    def cache_spec(self) -> StateShape:
        """See `TokenMixerConfig`."""
        matrix = self.num_heads, self.head_dim // _COLUMNS, self.state_size, _COLUMNS
        kept_width = 2 * self.num_channels + self.num_heads
        inputs = ((self.num_taps - 1, self.num_channels),)
        return StateShape(inputs, (matrix,), kept_width, self.channels, self.first_head)

    @property
    def channels(self) -> Ranges:
        """The convolution's channels, among those of the model."""
        return ((0, self.num_channels),)

    @property
    def first_head(self) -> int:
        """The first head, among those of the model."""
        return 0

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 2 * self.num_channels + 3 * self.num_values + self.num_heads

    def tensors(self, name: str, hidden_size: int) -> Mamba2Tensors:
        """See `TokenMixerConfig`."""
        name, num_inputs = f"{name}.mamba", self.num_values + self.num_channels + self.num_heads
        return Mamba2Tensors(
            inputs=Linear(((f"{name}.in_proj", num_inputs),), hidden_size, self.bias),
            conv=Taps(f"{name}.conv1d.weight", self.num_channels * self.num_taps, self.num_taps),
            conv_bias=Vector(f"{name}.conv1d.bias", self.num_channels) if self.conv_bias else None,
            dt_bias=Vector(f"{name}.dt_bias", self.num_heads),
            decay=Vector(f"{name}.{'decay' if self.decay_is_stored else 'A_log'}", self.num_heads),
            skip=Vector(f"{name}.D", self.num_heads),
            norm=Vector(f"{name}.norm.weight", self.num_values),
            out=Linear(((f"{name}.out_proj", hidden_size),), self.num_values, self.bias),
        )

    def build(self, context: ModelContext, tensors: Mamba2Tensors) -> Mamba2:
        """See `TokenMixerConfig`."""
        from octavo.models.mamba2_layer import Mamba2  # noqa: PLC0415

        return Mamba2(context, self, tensors)
