"""Computes gated short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.multiply import multiply
from octavo.kernels.operations.short_conv import short_conv

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.gated_conv import GatedConvConfig, GatedConvTensors
    from octavo.models.layers import ModelContext


class GatedConv:
    """The convolution of one layer. `cache` has its last inputs, and kept rows."""

    __slots__ = ("bias", "config", "inputs", "kernels", "out", "taps")

    def __init__(self, context: ModelContext, config: GatedConvConfig, tensors: GatedConvTensors) -> None:
        self.config, self.kernels, bias = config, context.kernels, tensors.conv_bias
        self.inputs, self.out = context.linear(tensors.inputs), context.linear(tensors.out)
        self.taps = context.vector(tensors.conv).view(config.num_channels, config.num_taps).t().contiguous()
        self.bias = torch.empty(0, device=self.taps.device) if bias is None else context.vector(bias)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Advance the state. Return the gated results [num_tokens, num_channels]."""
        kernels, states, (inputs, kept), size = self.kernels, batch.states, cache, self.config.num_channels
        assert states is not None
        before, after, x = kernels.linear(hidden, self.inputs).split_with_sizes((size,) * 3, dim=1)
        multiply(kernels, x, before)
        mixed = kernels.empty(len(hidden), size, like=hidden)
        short_conv(kernels, x, kept, self.taps, self.bias, inputs, states, False, mixed)
        keep_rows(kernels, x, x[:, :0], x[:, :0], kept, states)
        multiply(kernels, mixed, after)
        return mixed

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`. q: from `write_kv`."""
        del batch, cache
        return self.kernels.linear(q, self.out)
