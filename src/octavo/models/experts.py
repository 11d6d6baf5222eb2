"""Mixtures of experts (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear
from octavo.models.gated_mlp import GatedMLPTensors

if TYPE_CHECKING:
    from octavo.kernels.interface import Activation
    from octavo.models.config_file import ConfigFile
    from octavo.models.expert_layer import Experts
    from octavo.models.layers import ModelContext

SOFTMAX_OF_CHOSEN = 2  # as in `choose_experts`, which imports torch
_MOST_CHOSEN = 64  # csrc/experts.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses and weights experts; see `choose_experts`.

    least_sum: negative if weights are not normalized.
    """

    num_experts: int
    num_chosen: int
    scoring: int = 0
    num_groups: int = 1
    num_chosen_groups: int = 1
    is_group_best: bool = False
    least_sum: float = -1.0
    scale: float = 1.0
    has_bias: bool = False

    @classmethod
    def read(cls, config: ConfigFile, *, normalizes: bool) -> Router:
        """Read a router with a softmax over all experts.

        normalizes: True if the chosen experts' weights sum to 1.
        """
        key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
        num_experts, num_chosen = config.count(key), config.count("num_experts_per_tok")
        if num_chosen > min(num_experts, _MOST_CHOSEN):
            raise config.error("num_experts_per_tok", f"must be at most {key} = {num_experts}, and {_MOST_CHOSEN}")
        return cls(num_experts=num_experts, num_chosen=num_chosen, least_sum=0.0 if normalizes else -1.0)


class ExpertsTensors(NamedTuple):
    """The experts' tensors."""

    router: Linear
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    shared: GatedMLPTensors | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The weighted sum of the chosen experts' outputs, plus a shared expert that computes every token.

    has_shared_gate: a sigmoid of the token multiplies the shared expert's output. has_bias: the experts have biases.
    router_name: name in the checkpoint, after "mlp.".
    """

    router: Router
    hidden_size: int
    expert_size: int
    activation: Activation = "silu"
    shared_size: int | None = None
    has_shared_gate: bool = False
    has_bias: bool = False
    router_name: str = "gate"

    @property
    def intermediate_size(self) -> int:
        """Values per token. The experts' inputs and outputs take as much memory as three such rows."""
        return self.router.num_chosen * (self.expert_size + self.hidden_size) + (self.shared_size or 0)

    @property
    def num_idle_parameters(self) -> int:
        """Number of weights not used for a token."""
        idle = self.router.num_experts - self.router.num_chosen
        return idle * 3 * self.hidden_size * self.expert_size

    def tensors(self, name: str, hidden_size: int) -> ExpertsTensors:
        """See `MLPConfig`. Includes each expert's tensors."""
        name, num_experts = f"{name}.mlp", self.router.num_experts
        experts = [
            _expert(f"{name}.experts.{index}", hidden_size, self.expert_size, self.has_bias)
            for index in range(num_experts)
        ]
        shared = None
        if self.shared_size is not None:
            shared = _expert(f"{name}.shared_expert", hidden_size, self.shared_size)
        return ExpertsTensors(
            router=Linear(((f"{name}.{self.router_name}", num_experts),), hidden_size, self.router.has_bias),
            gate_up=tuple(each.gate_up for each in experts),
            down=tuple(each.down for each in experts),
            shared=shared,
            shared_gate=Linear(((f"{name}.shared_expert_gate", 1),), hidden_size) if self.has_shared_gate else None,
        )

    def build(self, context: ModelContext, tensors: ExpertsTensors) -> Experts:
        """See `MLPConfig`."""
        from octavo.models.expert_layer import Experts  # noqa: PLC0415

        return Experts(context, self, tensors)


def is_router(tensor_name: str) -> bool:
    """Return True for routers and shared experts' gates."""
    return tensor_name.endswith((".mlp.gate.weight", ".mlp.router.weight", ".mlp.shared_expert_gate.weight"))


def _expert(name: str, hidden_size: int, expert_size: int, has_bias: bool = False) -> GatedMLPTensors:
    gate_up = ((f"{name}.gate_proj", expert_size), (f"{name}.up_proj", expert_size))
    return GatedMLPTensors(
        gate_up=Linear(gate_up, hidden_size, has_bias),
        down=Linear(((f"{name}.down_proj", hidden_size),), expert_size, has_bias),
    )
