"""Computes Mamba-2."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.short_conv import short_conv

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch, RanksKernels
    from octavo.models.layers import ModelContext
    from octavo.models.mamba2 import Mamba2Config, Mamba2Tensors


class Mamba2:
    """Mamba-2 of one layer. `cache` has the convolution's inputs, the heads' states, and kept rows."""

    __slots__ = (
        "config", "conv_bias", "decay", "dt_bias", "eps", "inputs", "kernels", "norm", "out", "skip", "taps",
    )  # fmt: skip

    def __init__(self, context: ModelContext, config: Mamba2Config, tensors: Mamba2Tensors) -> None:
        self.config, self.kernels, self.eps = config, context.kernels, context.architecture.rms_norm_eps
        self.inputs = context.linear(tensors.inputs)
        self.taps = context.vector(tensors.conv).view(config.num_channels, config.num_taps).t().contiguous()
        no_bias = torch.empty(0, device=self.taps.device)
        self.conv_bias = no_bias if tensors.conv_bias is None else context.vector(tensors.conv_bias)
        self.dt_bias, decay = context.vector(tensors.dt_bias), context.vector(tensors.decay)
        self.decay = decay if config.decay_is_stored else -decay.exp()
        self.skip, self.norm = context.vector(tensors.skip), context.vector(tensors.norm)
        self.out = context.linear(tensors.out)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Advance the states. Return the heads' outputs [num_tokens, num_heads * head_dim].

        If `joined_values` is not None, return the outputs of all ranks' heads.
        """
        config, kernels, states, (inputs, matrices, kept) = self.config, self.kernels, batch.states, cache
        assert states is not None
        kept_xbc, kept_mixed, kept_dt = kept.split_with_sizes(
            (config.num_channels, config.num_channels, config.num_heads), dim=1
        )
        gate, xbc, dt = kernels.linear(hidden, self.inputs).split_with_sizes(
            (config.num_values, config.num_channels, config.num_heads), dim=1
        )
        mixed = kernels.empty(len(hidden), config.num_channels, like=hidden)
        short_conv(kernels, xbc, kept_xbc, self.taps, self.conv_bias, inputs, states, True, mixed)
        heads = kernels.empty(len(hidden), config.num_values, like=hidden)
        mamba2(
            kernels, mixed, dt, kept_mixed, kept_dt, self.dt_bias, self.decay, self.skip, config.dt_min, config.dt_max,
            matrices, states, config.num_groups, heads,
        )  # fmt: skip
        keep_rows(kernels, xbc, mixed, dt, kept, states)
        if (borders := config.joined_values) is not None:
            heads, gate = (cast("RanksKernels", kernels).join(each, borders) for each in (heads, gate))
        normed = kernels.empty(len(hidden), heads.shape[1], like=hidden)
        gated_norm(kernels, heads, gate, self.norm, self.eps, config.norm_size, True, normed)
        return normed

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`. q: from `write_kv`."""
        del batch, cache
        return self.kernels.linear(q, self.out)
