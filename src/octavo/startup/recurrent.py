"""Checks configurations of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.worker.device import resolve_device

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture


def check_recurrent_layers(config: EngineConfig, architecture: Architecture) -> None:
    """Raise `ConfigError` if the user asked for a GPU or kv_direct, which do not work with recurrent layers yet."""
    if not architecture.kv_layout.states:
        return
    if resolve_device(config.device.device).type != "cpu":
        raise ConfigError("models with recurrent layers run only on CPUs yet: choose device cpu")
    if config.device.kernels == "triton":
        raise ConfigError("kernels triton do not compute recurrent layers yet: choose kernels auto")
    if config.kv_transfer.direct:
        raise ConfigError(
            "kv_direct does not work with recurrent layers, because it does not transfer their states: use a store "
            "that both engines share, kv_disk_dir or kv_mooncake"
        )
