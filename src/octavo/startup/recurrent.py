"""Checks configurations of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.kernels import IN_TRITON
from octavo.worker.device import resolve_device

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture


def check_recurrent_layers(config: EngineConfig, architecture: Architecture, *, has_store: bool) -> None:
    """Raise `ConfigError` if a model has recurrent layers and the user asked for what they do not support yet.

    This is KV stores, ranks, and a GPU without Triton's kernels.
    """
    if not architecture.kv_layout.states:
        return
    if config.device.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size above 1 does not work with recurrent layers yet")
    if resolve_device(config.device.device).type != "cpu" and config.device.kernels not in IN_TRITON:
        raise ConfigError("on a GPU, recurrent layers need Triton's kernels: choose kernels triton or device cpu")
    if has_store or config.kv_transfer.names_store or config.kv_transfer.role != "both":
        raise ConfigError("KV stores and prefill/decode hand-over do not work with recurrent layers yet")
