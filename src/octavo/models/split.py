"""Divide a model among ranks, which are the processes that compute it together.

Each matrix is divided along its output features, and each attention head belongs to one rank. So one rank computes an
output value alone, in the order of a single process, and no partial sums are added. Before a product that needs all
features, ranks exchange activations. Tokens are therefore the same for any number of ranks and any number format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.models.attention import AttentionConfig
from octavo.models.experts import ExpertsConfig, ExpertsTensors, LatentTensors
from octavo.models.gated_attention import GatedAttentionConfig
from octavo.models.gated_conv import GatedConvConfig
from octavo.models.gated_delta import GatedDeltaConfig
from octavo.models.gated_mlp import GatedMLPConfig, GatedMLPTensors
from octavo.models.latent_attention import LatentAttentionConfig
from octavo.models.mamba2 import Mamba2Config
from octavo.models.no_sublayer import NoSublayer
from octavo.models.plain_mlp import PlainMLPConfig, PlainMLPTensors
from octavo.models.split_attention import SplitAttention, SplitGatedAttention, SplitLatentAttention
from octavo.models.split_recurrent import SplitGatedConv, SplitGatedDelta, SplitMamba2

if TYPE_CHECKING:
    from octavo.models.declared import Borders
    from octavo.models.decoder_layer import LayerConfig
    from octavo.models.share import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMLP(GatedMLPConfig):
    """One rank's features of a `GatedMLPConfig`."""

    whole: GatedMLPConfig
    share: Share

    @classmethod
    def of(cls, whole: GatedMLPConfig, share: Share) -> SplitMLP:
        """Take the rank's features."""
        first, end = share.own(share.borders(whole.intermediate_size))
        options = {name: getattr(whole, name) for name in GatedMLPConfig.__dataclass_fields__}
        return cls(**options | {"intermediate_size": end - first}, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> GatedMLPTensors:
        """See `MLPConfig`."""
        return self.share.mlp(self.whole.tensors(name, hidden_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlainMLP(PlainMLPConfig):
    """One rank's features of a `PlainMLPConfig`."""

    whole: PlainMLPConfig
    share: Share

    @classmethod
    def of(cls, whole: PlainMLPConfig, share: Share) -> SplitPlainMLP:
        """Take the rank's features."""
        first, end = share.own(share.borders(whole.intermediate_size))
        return cls(intermediate_size=end - first, bias=whole.bias, whole=whole, share=share)

    def tensors(self, name: str, hidden_size: int) -> PlainMLPTensors:
        """See `MLPConfig`."""
        whole = self.whole.tensors(name, hidden_size)
        return PlainMLPTensors(*self.share.mlp(GatedMLPTensors(*whole)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts(ExpertsConfig):
    """One rank's features of every expert of an `ExpertsConfig`, or its experts. Every rank chooses for all tokens."""

    whole: ExpertsConfig
    share: Share

    @classmethod
    def of(cls, whole: ExpertsConfig, share: Share) -> SplitExperts:
        """Take the rank's features or experts. Raises `ConfigError`."""
        if share.divides_by_expert:
            share.experts(whole.router.num_experts)
        options = {name: getattr(whole, name) for name in ExpertsConfig.__dataclass_fields__}
        return cls(**options, whole=whole, share=share)

    @property
    def outputs(self) -> Borders:
        """See `SplitLinear`."""
        return self.share.borders(self.width)

    @property
    def expert_borders(self) -> Borders | None:
        """See `ExpertsConfig`."""
        return self.share.experts(self.router.num_experts) if self.share.divides_by_expert else None

    @property
    def own_experts(self) -> tuple[int, int]:
        """See `ExpertsConfig`."""
        borders = self.expert_borders
        return (0, self.router.num_experts) if borders is None else self.share.own(borders)

    def tensors(self, name: str, hidden_size: int) -> ExpertsTensors:
        """See `MLPConfig`."""
        whole, share = self.whole.tensors(name, hidden_size), self.share
        own = slice(*self.own_experts)
        experts = [GatedMLPTensors(*each) for each in zip(whole.gate_up[own], whole.down[own], strict=True)]
        if not share.divides_by_expert:
            experts = [share.mlp(each, is_joined=False) for each in experts]
        shared = whole.shared
        if shared is not None:  # in a branch of its own, or next to latents, the shared expert is an MLP
            shared = share.mlp(shared, is_joined=self.branches is not None or self.latent_size is not None)
        return whole._replace(
            gate_up=tuple(each.gate_up for each in experts),
            down=tuple(each.down for each in experts),
            shared=shared,
            latents=None if whole.latents is None else LatentTensors(*map(share.rows, whole.latents)),
        )


def split_layer(layer: LayerConfig, share: Share) -> LayerConfig:
    """Take a rank's share of a layer. Raises `ConfigError` if the layer cannot be divided."""
    parts: list[Any] = []
    for whole in (layer.attention, layer.mlp):
        kind: Any = _KINDS.get(type(whole))
        if kind is None and not isinstance(whole, NoSublayer):
            raise ConfigError(f"tensor_parallel_size above 1 does not support {type(whole).__name__}")
        parts.append(whole if kind is None else kind.of(whole, share))
    return replace(layer, attention=parts[0], mlp=parts[1])


_KINDS: dict[type, type] = {
    AttentionConfig: SplitAttention,
    GatedAttentionConfig: SplitGatedAttention,
    LatentAttentionConfig: SplitLatentAttention,
    GatedDeltaConfig: SplitGatedDelta,
    GatedConvConfig: SplitGatedConv,
    Mamba2Config: SplitMamba2,
    GatedMLPConfig: SplitMLP,
    PlainMLPConfig: SplitPlainMLP,
    ExpertsConfig: SplitExperts,
}
