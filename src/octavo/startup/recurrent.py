"""Checks configurations of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.kernels import IN_TRITON
from octavo.worker.device import resolve_device

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture


def check_recurrent_layers(config: EngineConfig, architecture: Architecture) -> None:
    """Raise `ConfigError` if the user asked for something that does not work with recurrent layers yet.

    That is a GPU without Triton's kernels, or kv_direct.
    """
    if not architecture.kv_layout.states:
        return
    if resolve_device(config.device.device).type != "cpu" and config.device.kernels not in IN_TRITON:
        raise ConfigError("on a GPU, recurrent layers need Triton's kernels: choose kernels triton or device cpu")
    if config.kv_transfer.direct:
        raise ConfigError(
            "kv_direct does not work with recurrent layers, because it does not transfer their states: use a store "
            "that both engines share, kv_disk_dir or kv_mooncake"
        )
