"""Computes a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo.kernels.operations.add import add
from octavo.kernels.operations.add_experts import add_experts
from octavo.kernels.operations.choose_experts import choose_experts
from octavo.kernels.operations.relu_squared import relu_squared
from octavo.kernels.operations.sort_by_expert import sort_by_expert
from octavo.models.gated_mlp import GatedMLP, GatedMLPConfig
from octavo.models.plain_mlp import PlainMLP, PlainMLPTensors

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch, PackedGroups, RanksKernels
    from octavo.models.experts import ExpertsConfig, ExpertsTensors
    from octavo.models.layers import ModelContext


class Experts:
    """One layer's experts. starts: memory for `sort_by_expert`."""

    __slots__ = (
        "choice_bias", "config", "down", "expert_borders", "expert_scale", "gate_up", "kernels", "own_experts",
        "router", "shared_down", "shared_gate", "shared_gate_up", "starts",
    )  # fmt: skip

    def __init__(self, context: ModelContext, config: ExpertsConfig, tensors: ExpertsTensors) -> None:
        self.config, self.kernels = config, context.kernels
        self.expert_borders, self.own_experts = config.expert_borders, config.own_experts
        self.router = context.linear(tensors.router)
        self.choice_bias = None if tensors.choice_bias is None else context.vector(tensors.choice_bias)
        self.expert_scale = None if tensors.expert_scale is None else context.vector(tensors.expert_scale)
        self.gate_up, self.down = context.grouped(tensors.gate_up), context.grouped(tensors.down)
        shared, gate = tensors.shared, tensors.shared_gate
        self.shared_gate_up = None if shared is None else context.linear(shared.gate_up)
        self.shared_down = None if shared is None else context.linear(shared.down)
        self.shared_gate = None if gate is None else context.linear(gate)
        self.starts: Tensor | None = None
        context.experts.append(self)

    @property
    def bytes_per_expert(self) -> int:
        """Mean bytes of an expert's packed weights, in all ranks together.

        Includes column orders that ranks repeat. Assumes that all ranks have as many bytes per output feature.
        """
        first, end = self.own_experts
        whole = (1 + self.config.is_gated) * self.config.expert_size, self.config.width  # output features
        sizes = (own.num_bytes * rows // own.out_features for own, rows in zip(self.groups, whole, strict=True))
        return sum(sizes) // (end - first)

    @property
    def groups(self) -> tuple[PackedGroups, PackedGroups]:
        """The experts' weights."""
        return self.gate_up, self.down

    def forward(self, hidden: Tensor, batch: AttentionBatch, routed: Tensor | None = None) -> Tensor:
        """See `MLP`. routed: the router's input, by default `hidden`."""
        kernels, router, num_tokens = self.kernels, self.config.router, hidden.shape[0]
        num_chosen, integers = router.num_chosen, batch.query_start
        logits = kernels.linear(hidden if routed is None else routed, self.router, float32_out=True)
        nothing = logits[:0]
        choice_bias = nothing if self.choice_bias is None else self.choice_bias
        factors = nothing if self.expert_scale is None else self.expert_scale
        ids = kernels.empty(num_tokens, num_chosen, like=integers)
        weights = kernels.empty(num_tokens, num_chosen, like=logits)
        choose_experts(
            kernels, logits, choice_bias, factors, ids, weights, router.scoring, router.num_groups,
            router.num_chosen_groups, router.is_group_best, router.least_sum, router.scale,
        )  # fmt: skip
        sources = kernels.empty(num_tokens * num_chosen, like=batch.positions)
        places = kernels.empty(num_tokens, num_chosen, like=integers)
        starts = kernels.empty(router.num_experts + 1, like=integers) if self.starts is None else self.starts
        sort_by_expert(kernels, ids, sources, places, starts)
        expert_borders, (first, end) = self.expert_borders, self.own_experts
        own = starts if expert_borders is None else starts[first : end + 1]
        inner = kernels.grouped_linear(hidden, self.gate_up, own, sources=sources)
        if self.config.is_gated:
            inner = kernels.gate(inner, self.config.activation, group_start=own)
        else:
            relu_squared(kernels, inner)
        outputs = kernels.grouped_linear(inner, self.down, own, float32_out=True)
        shared = shared_gate = nothing
        if self.shared_gate_up is not None and self.shared_down is not None:
            if self.config.is_gated:
                inner = kernels.gated_linear(hidden, self.shared_gate_up, self.config.activation)
            else:
                inner = kernels.linear(hidden, self.shared_gate_up)
                relu_squared(kernels, inner)
            shared = kernels.linear(inner, self.shared_down, float32_out=True)
        if self.shared_gate is not None:
            shared_gate = kernels.linear(hidden, self.shared_gate, float32_out=True)
        columns = self.config.outputs
        if columns is None or expert_borders is None:
            out = kernels.empty(num_tokens, self.down.out_features, like=hidden)
            add_experts(kernels, outputs, ids, places, weights, shared, shared_gate, out, router.num_experts)
        else:
            out = cast("RanksKernels", kernels).add_rank_experts(
                outputs, ids, places, weights, shared, shared_gate, expert_borders, columns, hidden.dtype
            )
        return out if columns is None else cast("RanksKernels", kernels).join(out, columns)


class LatentExperts:
    """See `ExpertsConfig.latent_size`."""

    __slots__ = ("after", "before", "experts", "kernels", "shared")

    def __init__(self, context: ModelContext, config: ExpertsConfig, tensors: ExpertsTensors) -> None:
        shared, latents = tensors.shared, tensors.latents
        assert shared is not None
        assert latents is not None
        self.kernels = context.kernels
        self.before = context.linear(latents.before)
        self.experts = Experts(context, config, tensors._replace(shared=None))
        self.after = context.linear(latents.after)
        self.shared = PlainMLP(context, PlainMLPTensors(*shared))

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MLP`."""
        kernels = self.kernels
        latents = self.experts.forward(kernels.linear(hidden, self.before), batch, hidden)
        total = kernels.linear(latents, self.after)
        add(kernels, self.shared.forward(hidden, batch), total, 1.0)
        return total


class ExpertBranches:
    """See `ExpertsConfig.branches`."""

    __slots__ = ("eps", "experts", "kernels", "norms", "router_norm", "shared")

    def __init__(self, context: ModelContext, config: ExpertsConfig, tensors: ExpertsTensors) -> None:
        shared, norms = tensors.shared, tensors.branches
        assert shared is not None
        assert norms is not None
        assert config.shared_size is not None
        self.kernels, self.eps = context.kernels, context.architecture.rms_norm_eps
        mlp = GatedMLPConfig(intermediate_size=config.shared_size, activation=config.activation)
        self.shared = GatedMLP(context, mlp, shared)
        self.experts = Experts(context, config, tensors._replace(shared=None))
        self.norms = tuple(map(context.norm, norms[:4]))
        self.router_norm = context.vector(norms.router).mul_(config.hidden_size**-0.5)

    def forward(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MLP`. hidden: the residual stream."""
        before_shared, after_shared, before, after = self.norms

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return self.kernels.rms_norm(x, weight, self.eps)

        total = norm(self.shared.forward(norm(hidden, before_shared), batch), after_shared)
        routed = norm(hidden, self.router_norm)
        add(self.kernels, norm(self.experts.forward(norm(hidden, before), batch, routed), after), total, 1.0)
        return total
