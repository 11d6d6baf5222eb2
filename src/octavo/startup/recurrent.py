"""Checks configurations of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.worker.device import resolve_device

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture


def check_recurrent_layers(config: EngineConfig, architecture: Architecture, *, has_store: bool) -> None:
    """Raise `ConfigError` if the user asked for KV stores or a GPU, and the model has recurrent layers."""
    if not architecture.kv_layout.states:
        return
    if resolve_device(config.device.device).type != "cpu" or config.device.kernels == "triton":
        raise ConfigError("models with recurrent layers run only on CPUs yet: choose device cpu")
    if has_store or config.kv_transfer.names_store or config.kv_transfer.role != "both":
        raise ConfigError("KV stores and prefill/decode hand-over do not work with recurrent layers yet")
