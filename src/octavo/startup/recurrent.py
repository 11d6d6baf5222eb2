"""Checks configurations of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.worker.device import resolve_device

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture


def check_recurrent_layers(config: EngineConfig, architecture: Architecture) -> None:
    """Raise `ConfigError` if the user asked for ranks, a GPU or kv_direct, and the model has recurrent layers."""
    if not architecture.kv_layout.states:
        return
    if config.device.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size above 1 does not work with recurrent layers yet")
    if resolve_device(config.device.device).type != "cpu" or config.device.kernels == "triton":
        raise ConfigError("models with recurrent layers run only on CPUs yet: choose device cpu")
    if config.kv_transfer.direct:
        raise ConfigError(
            "kv_direct does not work with recurrent layers: it transfers only complete blocks, without recurrent "
            "states. Choose a store of both engines, kv_disk_dir or kv_mooncake"
        )
