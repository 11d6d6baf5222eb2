"""The MLP with a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import Activation, AttentionBatch
    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class GatedMLPTensors(NamedTuple):
    """Gated MLP tensors."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLPConfig:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    is_fused: bool = False

    @classmethod
    def read(
        cls,
        config: ConfigFile,
        *,
        bias: bool = False,
        activation_key: str = "hidden_act",
        default_activation: str = "silu",
        is_fused: bool = False,
    ) -> GatedMLPConfig:
        """Read sizes and activation."""
        activation = _ACTIVATIONS.get(config.text(activation_key, default_activation))
        if activation is None:
            raise config.error(activation_key, f"octavo computes {', '.join(_ACTIVATIONS)} only")
        return cls(
            intermediate_size=config.count("intermediate_size"), bias=bias, activation=activation, is_fused=is_fused
        )

    def tensors(self, name: str, hidden_size: int) -> GatedMLPTensors:
        """See `MLPConfig`."""
        name, inner = f"{name}.mlp", self.intermediate_size
        apart = ((f"{name}.gate_proj", inner), (f"{name}.up_proj", inner))
        gate_up = ((f"{name}.gate_up_proj", 2 * inner),) if self.is_fused else apart
        return GatedMLPTensors(
            gate_up=Linear(gate_up, hidden_size, self.bias),
            down=Linear(((f"{name}.down_proj", hidden_size),), inner, self.bias),
        )

    def build(self, context: ModelContext, tensors: GatedMLPTensors) -> GatedMLP:
        """See `MLPConfig`."""
        return GatedMLP(context, self, tensors)


class GatedMLP:
    """One layer's MLP."""

    __slots__ = ("activation", "down", "gate_up", "kernels")

    def __init__(self, context: ModelContext, config: GatedMLPConfig, tensors: GatedMLPTensors) -> None:
        self.activation: Activation = config.activation
        self.kernels = context.kernels
        self.gate_up = context.linear(tensors.gate_up)
        self.down = context.linear(tensors.down)

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MLP`."""
        del batch
        return self.kernels.linear(self.kernels.gated_linear(hidden, self.gate_up, self.activation), self.down)
