"""Adapts a configuration to models with recurrent layers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.architecture import Architecture

logger = logging.getLogger(__name__)


def for_recurrent_layers(config: EngineConfig, architecture: Architecture, *, has_store: bool) -> EngineConfig:
    """Return the configuration without features that would need states of earlier positions.

    These are the prefix cache, swapping and looked-up drafts. Raises `ConfigError` if the user asked for drafts, KV
    stores or ranks.
    """
    if not architecture.kv_layout.states:
        return config
    if config.device.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size above 1 does not work with recurrent layers yet")
    if has_store or config.kv_transfer.names_store or config.kv_transfer.role != "both":
        raise ConfigError("KV stores and prefill/decode hand-over do not work with recurrent layers yet")
    if config.speculative.is_requested:
        raise ConfigError(
            f"speculative method {config.speculative.method} does not work with recurrent layers yet: choose none"
        )
    cache, speculative = config.cache, replace(config.speculative, method="none")
    if cache.enable_prefix_caching or cache.swap_space_bytes:
        logger.info("the model has recurrent layers: common prefixes are computed again, and requests are not swapped")
        cache = replace(cache, enable_prefix_caching=False, swap_space_bytes=0)
    return replace(config, cache=cache, speculative=speculative)
