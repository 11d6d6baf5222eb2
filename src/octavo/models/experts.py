"""Mixtures of experts (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import Linear, Norm, Vector
from octavo.models.gated_mlp import GatedMLPTensors

if TYPE_CHECKING:
    from octavo.kernels.interface import Activation
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLP
    from octavo.models.layers import ModelContext

SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2  # see `choose_experts`, which imports torch
ROUTERS = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate")  # ends of names
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_CHOSEN = 64  # csrc/experts.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses and weights experts; see `choose_experts`.

    least_sum         negative if weights are not normalized
    has_bias          of the router's linear layer
    has_choice_bias   a bias changes the choice, but not the weights
    has_expert_scale  a number of each expert multiplies its weight
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
    has_choice_bias: bool = False
    has_expert_scale: bool = False

    @classmethod
    def read(cls, config: ConfigFile, *, normalizes: bool, num_chosen_key: str = "num_experts_per_tok") -> Router:
        """Read a router with a softmax over all experts. normalizes: the chosen experts' weights sum to 1."""
        key = next((each for each in _COUNTS if config.has(each)), "num_experts")
        num_experts, num_chosen = config.count(key), config.count(num_chosen_key)
        if num_chosen > min(num_experts, _MOST_CHOSEN):
            raise config.error(num_chosen_key, f"must be at most {key} = {num_experts}, and {_MOST_CHOSEN}")
        return cls(num_experts=num_experts, num_chosen=num_chosen, least_sum=0.0 if normalizes else -1.0)

    def in_groups(self, config: ConfigFile) -> Router:
        """Read DeepSeek's keys for the choice of groups of experts and for the scale of weights.

        Raises `ModelError` if the chosen groups have too few experts.
        """
        groups, chosen = config.count("n_group", 1), config.count("topk_group", 1)
        if self.num_experts % groups:
            raise config.error("n_group", f"must divide the number of experts, {self.num_experts}")
        if chosen > groups:
            raise config.error("topk_group", f"must be at most n_group = {groups}")
        if (offered := self.num_experts // groups * chosen) < self.num_chosen:
            problem = f"{chosen} of {groups} groups have {offered} experts, but {self.num_chosen} are chosen"
            raise config.error("topk_group", problem)
        scale = config.number("routed_scaling_factor", 1.0)
        return replace(self, num_groups=groups, num_chosen_groups=chosen, scale=scale)


class ExpertsTensors(NamedTuple):
    """The experts' tensors."""

    router: Linear
    choice_bias: Vector | None
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    shared: GatedMLPTensors | None
    shared_gate: Linear | None
    expert_scale: Vector | None
    branches: BranchTensors | None
    latents: LatentTensors | None


class LatentTensors(NamedTuple):
    """The linear layers before and after the experts; see `ExpertsConfig.latent_size`."""

    before: Linear
    after: Linear


class BranchTensors(NamedTuple):
    """See `BranchNorms`."""

    before_shared: Norm
    after_shared: Norm
    before_experts: Norm
    after_experts: Norm
    router: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchNorms:
    """Names of norms before and after the shared and the other experts."""

    before_shared: str
    after_shared: str
    before_experts: str
    after_experts: str

    def tensors(self, layer: str, router: str, hidden_size: int) -> BranchTensors:
        """Declare the norms."""

        def norm(name: str) -> Norm:
            return Norm(f"{layer}.{name}", hidden_size)

        return BranchTensors(
            before_shared=norm(self.before_shared),
            after_shared=norm(self.after_shared),
            before_experts=norm(self.before_experts),
            after_experts=norm(self.after_experts),
            router=Vector(f"{router}.scale", hidden_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The weighted sum of the chosen experts' outputs, plus a shared expert's output.

    has_shared_gate: a linear layer's sigmoid multiplies the shared expert's output. has_bias: of the experts.
    has_shared_bias: of the shared expert, and of the linear layers of `latent_size`.
    is_gated: False for experts, also shared ones, that compute down(max(up(x), 0)^2).
    latent_size: a linear layer computes this many inputs of the experts, and another one the hidden state from their
    weighted sum. The router and the shared expert, which has no gate, read the hidden state. None: so do the experts.
    is_shared_fused: the checkpoint stores the shared expert's gate and up projections in one tensor.
    router_name, shared_name: names in the checkpoint, after "mlp.". branches: separate norms of the residual stream for
    shared expert, experts and router.
    """

    router: Router
    hidden_size: int
    expert_size: int
    activation: Activation = "silu"
    shared_size: int | None = None
    has_shared_gate: bool = False
    has_bias: bool = False
    has_shared_bias: bool = False
    is_gated: bool = True
    is_shared_fused: bool = False
    router_name: str = "gate"
    shared_name: str = "shared_expert"
    branches: BranchNorms | None = None
    latent_size: int | None = None

    @property
    def width(self) -> int:
        """Number of inputs and outputs of an expert."""
        return self.latent_size or self.hidden_size

    @property
    def intermediate_size(self) -> int:
        """See `MLPConfig`. Three times this number also covers the experts' inputs and outputs."""
        num_latents = self.latent_size or 0
        return self.router.num_chosen * (self.expert_size + self.width) + (self.shared_size or 0) + num_latents

    @property
    def outputs(self) -> tuple[int, ...] | None:
        """See `SplitLinear`."""
        return None

    @property
    def expert_borders(self) -> tuple[int, ...] | None:
        """Each rank's first expert, then their number. None if each rank has all experts, whole or in part."""
        return None

    @property
    def own_experts(self) -> tuple[int, int]:
        """The first and end expert of this process."""
        return 0, self.router.num_experts

    @property
    def num_idle_parameters(self) -> int:
        """Weights not used for a token."""
        idle = self.router.num_experts - self.router.num_chosen
        return idle * (2 + self.is_gated) * self.width * self.expert_size

    def tensors(self, name: str, hidden_size: int) -> ExpertsTensors:
        """See `MLPConfig`. Includes each expert's tensors."""
        layer, name, num_experts = name, f"{name}.mlp", self.router.num_experts
        experts = [
            self._expert(f"{name}.experts.{index}", self.width, self.expert_size, self.has_bias)
            for index in range(num_experts)
        ]
        shared, shared_name = None, f"{name}.{self.shared_name}" if self.shared_name else name
        if self.shared_size is not None:
            shared = self._expert(
                shared_name, hidden_size, self.shared_size, self.has_shared_bias, is_fused=self.is_shared_fused
            )
        router, choice_bias, expert_scale = f"{name}.{self.router_name}", None, None
        if self.router.has_choice_bias:
            choice_bias = Vector(f"{router}.e_score_correction_bias", num_experts)
        if self.router.has_expert_scale:
            expert_scale = Vector(f"{router}.per_expert_scale", num_experts)
        return ExpertsTensors(
            router=Linear(((router, num_experts),), hidden_size, self.router.has_bias),
            choice_bias=choice_bias,
            gate_up=tuple(each.gate_up for each in experts),
            down=tuple(each.down for each in experts),
            shared=shared,
            shared_gate=Linear(((f"{shared_name}_gate", 1),), hidden_size) if self.has_shared_gate else None,
            expert_scale=expert_scale,
            branches=None if self.branches is None else self.branches.tensors(layer, router, hidden_size),
            latents=None if self.latent_size is None else self._latents(name, self.latent_size),
        )

    def _latents(self, name: str, latent_size: int) -> LatentTensors:
        before, after = ((f"{name}.fc1_latent_proj", latent_size),), ((f"{name}.fc2_latent_proj", self.hidden_size),)
        return LatentTensors(
            before=Linear(before, self.hidden_size, self.has_shared_bias),
            after=Linear(after, latent_size, self.has_shared_bias),
        )

    def _expert(
        self, name: str, hidden_size: int, size: int, has_bias: bool, *, is_fused: bool = False
    ) -> GatedMLPTensors:
        gate_up: tuple[tuple[str, int], ...] = ((f"{name}.gate_proj", size), (f"{name}.up_proj", size))
        if is_fused:
            gate_up = ((f"{name}.gate_up_proj", 2 * size),)
        return GatedMLPTensors(
            gate_up=Linear(gate_up if self.is_gated else gate_up[1:], hidden_size, has_bias),
            down=Linear(((f"{name}.down_proj", hidden_size),), size, has_bias),
        )

    def build(self, context: ModelContext, tensors: ExpertsTensors) -> MLP:
        """See `MLPConfig`."""
        from octavo.models.expert_layer import ExpertBranches, Experts, LatentExperts  # noqa: PLC0415

        if self.latent_size is not None:
            return LatentExperts(context, self, tensors)
        return (Experts if self.branches is None else ExpertBranches)(context, self, tensors)


def is_router(tensor_name: str) -> bool:
    """Return True for routers and shared experts' gates."""
    return tensor_name.endswith(tuple(f".{each}.weight" for each in ROUTERS))
