"""What the dashboard shows of prefix hits and recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats


def prefix_figures(stats: EngineStats, capacity: EngineCapacity) -> dict[str, Any]:
    """Return figures of the dashboard.

    unusable: Cached tokens that are computed again, by `HitLimit`. states: None without recurrent layers.
    """
    slots = stats.state_slots or capacity.empty_states
    states = None
    if slots is not None:
        states = {
            "running": slots.num_running,
            "checkpoints": slots.num_checkpoints,
            "free": slots.num_free,
            "saved": stats.num_saved_checkpoints,
            "evicted": stats.num_evicted_checkpoints,
        }
    return {"unusable": dict(stats.prefix_cache_unusable), "states": states}
