"""The gated delta net (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear, RowsPart, Taps, Vector
from octavo.models.kv_layout import StateShape
from octavo.models.short_conv import read_num_taps

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.declared import Ranges
    from octavo.models.gated_delta_layer import GatedDelta
    from octavo.models.layers import ModelContext

_COLUMNS = 16  # octavo.kernels.state_batch


class GatedDeltaTensors(NamedTuple):
    """A layer's tensors. inputs: queries, keys, values and the output's gate. rates: b and a."""

    inputs: Linear
    rates: Linear
    conv: Vector
    decay: Vector
    dt_bias: Vector
    norm: Vector
    out: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A layer with a state [key_dim, value_dim] for each head, instead of keys and values.

    num_taps           width of the convolution before the heads
    is_tiled           value head h uses key head h % num_key_heads, instead of consecutive value heads the same one
    decay_is_stored    A_log holds -exp(A_log)
    has_joined_inputs  one matrix has the rows of queries, keys, values and gates of each key head together
    has_joined_rates   one matrix has the rows of b and a of each key head together
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    is_tiled: bool = False
    decay_is_stored: bool = False
    has_joined_inputs: bool = False
    has_joined_rates: bool = False

    @classmethod
    def read(cls, config: ConfigFile) -> GatedDeltaConfig:
        """Read the sizes."""
        num_key_heads, num_heads = config.count("linear_num_key_heads", 16), config.count("linear_num_value_heads", 32)
        value_dim = config.count("linear_value_head_dim", 128)
        if num_heads % num_key_heads:
            raise config.error(
                "linear_num_value_heads", f"must be a multiple of linear_num_key_heads = {num_key_heads}"
            )
        if value_dim % _COLUMNS:
            raise config.error("linear_value_head_dim", f"must be a multiple of {_COLUMNS}, not {value_dim}")
        return cls(
            num_key_heads=num_key_heads,
            num_value_heads=num_heads,
            key_dim=config.count("linear_key_head_dim", 128),
            value_dim=value_dim,
            num_taps=read_num_taps(config, "linear_conv_kernel_dim", 4),
            is_tiled=config.flag("value_heads_are_tiled", default=False),
            decay_is_stored=config.flag("decay_is_stored", default=False),
        )

    def within(self, max_model_len: int) -> GatedDeltaConfig:
        """See `TokenMixerConfig`."""
        del max_model_len
        return self

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def num_values(self) -> int:
        """Values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def cache_spec(self) -> StateShape:
        """See `TokenMixerConfig`."""
        matrix = self.num_value_heads, self.value_dim // _COLUMNS, self.key_dim, _COLUMNS
        kept_width = 2 * self.num_channels + 2 * self.num_value_heads
        inputs = ((self.num_taps - 1, self.num_channels),)
        return StateShape(inputs, (matrix,), kept_width, self.channels, self.first_head)

    @property
    def channels(self) -> Ranges:
        """The convolution's channels, among those of the model."""
        return ((0, self.num_channels),)

    @property
    def first_head(self) -> int:
        """The first value head, among those of the model."""
        return 0

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 2 * self.num_channels + 3 * self.num_values

    def tensors(self, name: str, hidden_size: int) -> GatedDeltaTensors:
        """See `TokenMixerConfig`."""
        name, num_heads = f"{name}.linear_attn", self.num_value_heads
        return GatedDeltaTensors(
            inputs=self._inputs(name, hidden_size),
            rates=self._rates(name, hidden_size),
            conv=Taps(f"{name}.conv1d.weight", self.num_channels * self.num_taps, self.num_taps),
            decay=Vector(f"{name}.A_log", num_heads),
            dt_bias=Vector(f"{name}.dt_bias", num_heads),
            norm=Vector(f"{name}.norm.weight", self.value_dim),
            out=Linear(((f"{name}.out_proj", hidden_size),), self.num_values),
        )

    def _inputs(self, name: str, hidden_size: int) -> Linear:
        if not self.has_joined_inputs:
            parts = (f"{name}.in_proj_qkv", self.num_channels), (f"{name}.in_proj_z", self.num_values)
            return Linear(parts, hidden_size)
        whole = Linear(((f"{name}.in_proj_qkvz", self.num_channels + self.num_values),), hidden_size)
        num_values = self.num_values // self.num_key_heads
        return self._apart(whole, (self.key_dim, self.key_dim, num_values, num_values))

    def _rates(self, name: str, hidden_size: int) -> Linear:
        num_heads = self.num_value_heads
        if not self.has_joined_rates:
            return Linear(((f"{name}.in_proj_b", num_heads), (f"{name}.in_proj_a", num_heads)), hidden_size)
        whole = Linear(((f"{name}.in_proj_ba", 2 * num_heads),), hidden_size)
        return self._apart(whole, (num_heads // self.num_key_heads,) * 2)

    def _apart(self, whole: Linear, sizes: tuple[int, ...]) -> RowsPart:
        """Order rows by kind. sizes: each kind's rows of a key head."""
        starts = range(0, whole.out_features, sum(sizes))
        kinds = pairwise(accumulate(sizes, initial=0))
        return RowsPart.of(whole, [(start + first, start + end) for first, end in kinds for start in starts])

    def build(self, context: ModelContext, tensors: GatedDeltaTensors) -> GatedDelta:
        """See `TokenMixerConfig`."""
        from octavo.models.gated_delta_layer import GatedDelta  # noqa: PLC0415

        return GatedDelta(context, self, tensors)


def is_rate(matrix_name: str) -> bool:
    """Return True for the small matrices of b and a."""
    return matrix_name.removesuffix(".weight").endswith((".in_proj_b", ".in_proj_a", ".in_proj_ba"))
