"""Reads `layer_types`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.models.config_file import ConfigFile

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(config: ConfigFile, *, pattern: int | None = None) -> list[str]:
    """Return `FULL` or `SLIDING` by layer. Without `layer_types`, every `pattern`-th layer is full."""
    num_layers = config.count("num_hidden_layers")
    if pattern is not None and not config.has("layer_types"):
        return [SLIDING if (index + 1) % pattern else FULL for index in range(num_layers)]
    kinds = config.values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must list num_hidden_layers = {num_layers} entries")
    for kind in kinds:
        if kind not in {FULL, SLIDING}:
            raise config.error("layer_types", f"octavo supports {FULL} and {SLIDING}, not {kind!r}")
    return kinds


def read_hybrid_types(config: ConfigFile, *, old_names: Mapping[str, str] | None = None) -> list[str]:
    """Return `FULL` or `LINEAR` by layer. old_names: other names of these kinds."""
    num_layers, kinds = config.count("num_hidden_layers"), config.values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must list num_hidden_layers = {num_layers} entries")
    kinds = [(old_names or {}).get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in (FULL, LINEAR):
            raise config.error("layer_types", f"octavo supports {FULL} and {LINEAR} in this family, not {kind!r}")
    if FULL not in kinds:
        raise config.error("layer_types", f"octavo needs at least one layer with {FULL}")
    return kinds
