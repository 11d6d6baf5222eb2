"""Computes the gated delta net."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.short_conv import short_conv

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.gated_delta import GatedDeltaConfig, GatedDeltaTensors
    from octavo.models.layers import ModelContext


class GatedDelta:
    """The gated delta net of one layer. `cache` has the convolution's inputs, the heads' states, and kept rows."""

    __slots__ = (
        "config", "decay", "dt_bias", "eps", "inputs", "kernels", "no_bias", "norm", "out", "rates", "taps",
    )  # fmt: skip

    def __init__(self, context: ModelContext, config: GatedDeltaConfig, tensors: GatedDeltaTensors) -> None:
        self.config, self.kernels, self.eps = config, context.kernels, context.architecture.rms_norm_eps
        self.inputs, self.rates = context.linear(tensors.inputs), context.linear(tensors.rates)
        self.taps = context.vector(tensors.conv).view(config.num_channels, config.num_taps).t().contiguous()
        self.no_bias = torch.empty(0, device=self.taps.device)
        decay = context.vector(tensors.decay)
        self.decay = decay if config.decay_is_stored else -decay.exp()
        self.dt_bias, self.norm = context.vector(tensors.dt_bias), context.vector(tensors.norm)
        self.out = context.linear(tensors.out)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Advance the states. Return the heads' outputs [num_tokens, num_value_heads * value_dim]."""
        config, kernels, states, (inputs, matrices, kept) = self.config, self.kernels, batch.states, cache
        assert states is not None
        num_heads = (config.num_value_heads,) * 2
        kept_qkv, kept_mixed, kept_b, kept_a = kept.split_with_sizes((config.num_channels,) * 2 + num_heads, dim=1)
        qkv, gate = kernels.linear(hidden, self.inputs).split_with_sizes(
            (config.num_channels, config.num_values), dim=1
        )
        rates = kernels.linear(hidden, self.rates)
        b, a = rates.split_with_sizes(num_heads, dim=1)
        mixed = kernels.empty(len(hidden), config.num_channels, like=hidden)
        short_conv(kernels, qkv, kept_qkv, self.taps, self.no_bias, inputs, states, True, mixed)
        heads = kernels.empty(len(hidden), config.num_values, like=hidden)
        gated_delta(
            kernels, mixed, a, b, kept_mixed, kept_a, kept_b, self.decay, self.dt_bias, matrices, states,
            config.num_key_heads, config.is_tiled, heads,
        )  # fmt: skip
        keep_rows(kernels, qkv, mixed, rates, kept, states)
        normed = kernels.empty(len(hidden), config.num_values, like=hidden)
        gated_norm(kernels, heads, gate, self.norm, self.eps, config.value_dim, False, normed)
        return normed

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`. q: from `write_kv`."""
        del batch, cache
        return self.kernels.linear(q, self.out)
