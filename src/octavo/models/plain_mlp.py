"""The MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext


class PlainMLPTensors(NamedTuple):
    """Plain MLP tensors."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMLPConfig:
    """down(max(up(x), 0)^2) (So et al. 2021)."""

    intermediate_size: int
    bias: bool = False

    @classmethod
    def read(cls, config: ConfigFile) -> PlainMLPConfig:
        """Read the size."""
        if config.text("mlp_hidden_act", "relu2") != "relu2":
            raise config.error("mlp_hidden_act", "octavo computes relu2 only in MLPs without a gate")
        return cls(intermediate_size=config.count("intermediate_size"), bias=config.flag("mlp_bias", default=False))

    def tensors(self, name: str, hidden_size: int) -> PlainMLPTensors:
        """See `MLPConfig`."""
        name, inner = f"{name}.mlp", self.intermediate_size
        return PlainMLPTensors(
            up=Linear(((f"{name}.up_proj", inner),), hidden_size, self.bias),
            down=Linear(((f"{name}.down_proj", hidden_size),), inner, self.bias),
        )

    def build(self, context: ModelContext, tensors: PlainMLPTensors) -> PlainMLP:
        """See `MLPConfig`."""
        return PlainMLP(context, tensors)


class PlainMLP:
    """One layer's MLP."""

    __slots__ = ("activate", "down", "kernels", "up")

    def __init__(self, context: ModelContext, tensors: PlainMLPTensors) -> None:
        from octavo.kernels.operations.relu_squared import relu_squared  # noqa: PLC0415

        self.activate, self.kernels = relu_squared, context.kernels
        self.up, self.down = context.linear(tensors.up), context.linear(tensors.down)

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MLP`."""
        del batch
        inner = self.kernels.linear(hidden, self.up)
        self.activate(self.kernels, inner)
        return self.kernels.linear(inner, self.down)
