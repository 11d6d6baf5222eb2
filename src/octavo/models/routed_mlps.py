"""Reads MLPs of DeepSeek's form: dense layers first, then experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.models.experts import SIGMOID, ExpertsConfig, Router
from octavo.models.gated_mlp import GatedMLPConfig

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.config_file import ConfigFile
    from octavo.models.decoder_layer import MLPConfig

_DENSE, _SPARSE = "dense", "sparse"
_LEAST_SUM = 1e-20  # as in transformers
_ROUTERS = ("mlp.gate", "mlp.router")


def read_routed_mlps(
    config: ConfigFile, router: Router, *, num_dense: int, bias: bool = False
) -> tuple[MLPConfig, ...]:
    """Return each layer's MLP. num_dense: default number of dense layers. bias: of dense MLPs and shared experts."""
    mlp = GatedMLPConfig.read(config, bias=bias)
    experts = ExpertsConfig(
        router=router,
        hidden_size=config.count("hidden_size"),
        expert_size=config.count("moe_intermediate_size"),
        activation=mlp.activation,
        shared_size=_shared_size(config),
        shared_name="shared_experts",
        has_shared_bias=bias,
    )
    return tuple(mlp if kind == _DENSE else experts for kind in _mlp_kinds(config, num_dense))


def read_sigmoid_router(config: ConfigFile) -> Router:
    """Read V3's router, with a bias for the choice."""
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    normalizes = config.flag("norm_topk_prob", default=True)
    router = Router.read(config, normalizes=False).in_groups(config)
    least_sum = _LEAST_SUM if normalizes else -1.0
    return replace(router, scoring=SIGMOID, least_sum=least_sum, has_choice_bias=True)


def with_float_routers(architecture: Architecture) -> Architecture:
    """Return a copy with routers, and lm_head of FP8 checkpoints, as floats."""
    floats, integers = architecture.stored_floats, architecture.stored
    if floats is not None:
        floats = replace(floats, ignored=(*floats.ignored, *_ROUTERS, "lm_head"))
    if integers is not None:
        integers = replace(integers, ignored=(*integers.ignored, *_ROUTERS))
    return replace(architecture, stored_floats=floats, stored=integers)


def require(config: ConfigFile, key: str, value: str) -> None:
    """Raise `ModelError` if a key has another value."""
    if config.text(key, value) != value:
        raise config.error(key, f"octavo supports {value} only for this family")


def _shared_size(config: ConfigFile) -> int | None:
    if not config.values.get("n_shared_experts", 1):
        return None
    return config.count("n_shared_experts", 1) * config.count("moe_intermediate_size")


def _mlp_kinds(config: ConfigFile, num_dense: int) -> list[str]:
    num_layers = config.count("num_hidden_layers")
    if config.has("mlp_layer_types"):
        kinds = config.values["mlp_layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {_DENSE, _SPARSE}:
            raise config.error("mlp_layer_types", f"must list {_DENSE} or {_SPARSE} for {num_layers} layers")
        return kinds
    if config.count("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "octavo supports 1 only: experts in all layers after the dense ones")
    num_dense = config.values.get("first_k_dense_replace", num_dense)
    if isinstance(num_dense, bool) or not isinstance(num_dense, int) or not 0 <= num_dense <= num_layers:
        raise config.error("first_k_dense_replace", f"must be an integer from 0 to {num_layers}")
    return [_DENSE] * num_dense + [_SPARSE] * (num_layers - num_dense)
