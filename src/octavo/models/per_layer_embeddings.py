"""Embeddings of tokens for each layer (Gemma 3n and 4). Only `build` imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear, Norm, Table, Vector

if TYPE_CHECKING:
    from octavo.kernels.interface import Activation
    from octavo.models.layers import ModelContext
    from octavo.models.per_layer_inputs import LayerInput, LayerInputs


class InputsTensors(NamedTuple):
    """Tensors of all layers."""

    table: Table
    projection: Linear
    norm: Vector


class InputTensors(NamedTuple):
    """Tensors of one layer."""

    gate: Linear
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerEmbeddings:
    """A layer's input is (norm(projection(embedding)) + sqrt(width) * table row) / sqrt(2).

    The layer adds norm(projection(activation(gate(hidden)) * input)) to the residual stream. The table of `num_rows`
    stays in its file.
    """

    num_layers: int
    num_rows: int
    width: int
    activation: Activation

    @property
    def total_width(self) -> int:
        """Values per token."""
        return self.num_layers * self.width

    def tensors(self, hidden_size: int) -> InputsTensors:
        """Declare the tensors of all layers together."""
        return InputsTensors(
            table=Table("model.embed_tokens_per_layer", self.num_rows, self.total_width),
            projection=Linear((("model.per_layer_model_projection", self.total_width),), hidden_size),
            norm=Vector("model.per_layer_projection_norm.weight", self.width),
        )

    def layer_tensors(self, name: str, hidden_size: int) -> InputTensors:
        """Declare a layer's tensors."""
        return InputTensors(
            gate=Linear(((f"{name}.per_layer_input_gate", self.width),), hidden_size),
            projection=Linear(((f"{name}.per_layer_projection", hidden_size),), self.width),
            norm=Norm(f"{name}.post_per_layer_input_norm", hidden_size),
        )

    def build(self, context: ModelContext, tensors: InputsTensors) -> LayerInputs:
        """Return the module that computes the inputs of all layers."""
        from octavo.models.per_layer_inputs import LayerInputs  # noqa: PLC0415

        return LayerInputs(context, self, tensors)

    def build_layer(self, context: ModelContext, tensors: InputTensors) -> LayerInput:
        """Build a layer's input."""
        from octavo.models.per_layer_inputs import LayerInput  # noqa: PLC0415

        return LayerInput(context, self, tensors)
