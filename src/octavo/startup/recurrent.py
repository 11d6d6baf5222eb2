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
    """Raise `ConfigError` if the user asked for something that does not work with recurrent layers yet.

    That is a GPU without Triton's kernels, kv_direct, or KV stores together with ranks.
    """
    if not architecture.kv_layout.states:
        return
    if resolve_device(config.device.device).type != "cpu" and config.device.kernels not in IN_TRITON:
        raise ConfigError("on a GPU, recurrent layers need Triton's kernels: choose kernels triton or device cpu")
    has_store = has_store or config.kv_transfer.names_store or config.kv_transfer.role != "both"
    if has_store and config.device.tensor_parallel_size > 1:
        raise ConfigError(
            "with recurrent layers, KV stores and the roles prefill and decode do not work with tensor_parallel_size "
            "above 1 yet: choose tensor_parallel_size 1, or no store and role both"
        )
    if config.kv_transfer.direct:
        raise ConfigError(
            "kv_direct does not work with recurrent layers, because it does not transfer their states: use a store "
            "that both engines share, kv_disk_dir or kv_mooncake"
        )
