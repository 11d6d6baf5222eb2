"""Computes per-layer embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from octavo.kernels.operations.add import add

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.models.layers import ModelContext
    from octavo.models.per_layer_embeddings import InputsTensors, InputTensors, PerLayerEmbeddings

_HALF_POWER = 2.0**-0.5


class LayerInputs:
    """The inputs of all layers."""

    __slots__ = ("config", "eps", "kernels", "norm", "projection", "table")

    def __init__(self, context: ModelContext, config: PerLayerEmbeddings, tensors: InputsTensors) -> None:
        self.config, self.kernels = config, context.kernels
        architecture = context.architecture
        self.eps = architecture.rms_norm_eps * architecture.hidden_size  # instead of scaling the norm's input
        self.table = context.weights.table(tensors.table)
        self.projection = context.linear(tensors.projection)
        self.norm = context.vector(tensors.norm).mul_(_HALF_POWER)

    def forward(self, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """Return [num_tokens, num_layers, width] for scaled embeddings [num_tokens, hidden]."""
        config, shape = self.config, (len(token_ids), self.config.total_width)
        projected = self.kernels.linear(embeddings, self.projection).view(-1, config.width)
        inputs = self.kernels.rms_norm(projected, self.norm, self.eps).view(shape)
        del projected
        rows = self.table.rows(token_ids, inputs.dtype).to(inputs.device)
        add(self.kernels, rows, inputs, math.sqrt(config.width) * _HALF_POWER)
        return inputs.view(-1, config.num_layers, config.width)


class LayerInput:
    """Adds one layer's input."""

    __slots__ = ("activation", "gate", "kernels", "projection")

    def __init__(self, context: ModelContext, config: PerLayerEmbeddings, tensors: InputTensors) -> None:
        self.kernels, self.activation = context.kernels, config.activation
        self.gate, self.projection = context.linear(tensors.gate), context.linear(tensors.projection)

    def forward(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Map hidden [num_tokens, hidden] and inputs [num_tokens, width] to [num_tokens, hidden]."""
        gate = self.kernels.linear(hidden, self.gate)
        gated = self.kernels.gate(torch.cat((gate, inputs), dim=1), self.activation)
        return self.kernels.linear(gated, self.projection)
