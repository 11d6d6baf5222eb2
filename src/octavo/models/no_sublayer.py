"""A layer without a token mixer, or without an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models.kv_layout import NothingStored

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.layers import ModelContext


@dataclass(frozen=True, slots=True)
class NoSublayer:
    """A missing sublayer: a `TokenMixerConfig` and an `MLPConfig`."""

    @property
    def cache_spec(self) -> NothingStored:
        """See `TokenMixerConfig`."""
        return NothingStored()

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return 0

    @property
    def intermediate_size(self) -> int:
        """See `MLPConfig`."""
        return 0

    def within(self, max_model_len: int) -> NoSublayer:
        """See `TokenMixerConfig`."""
        del max_model_len
        return self

    def tensors(self, name: str, hidden_size: int) -> tuple[()]:
        """Return nothing."""
        del name, hidden_size
        return ()

    def build(self, context: ModelContext, tensors: tuple[()]) -> Unchanged:
        """See `TokenMixerConfig` and `MLPConfig`."""
        del context, tensors
        return Unchanged()


class Unchanged:
    """A `TokenMixer`, an `MLP`, or the norm after one of them, that returns its input."""

    __slots__ = ()

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`."""
        del batch, cache
        return hidden

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`."""
        del batch, cache
        return q

    def forward(self, hidden: Tensor, other: object) -> Tensor:
        """See `MLP`. other: the batch, or the residual stream."""
        del other
        return hidden
