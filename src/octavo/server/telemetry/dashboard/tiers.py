"""The dashboard's rows of KV tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.data.kv_tiers import HOST

if TYPE_CHECKING:
    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats


def tier_rows(stats: EngineStats, capacity: EngineCapacity) -> list[dict[str, Any]]:
    """Return a row of the dashboard for each KV tier. Unknown figures are None.

    hit_rate: Share of looked-up prompt tokens that the tier had.
    loads_per_s, saves_per_s: Bytes per second.
    spared: Estimated seconds of computing that loads avoided, minus the seconds of waiting for the loads.
    """
    return [
        {
            "name": name,
            "hit_rate": _rate(tier.num_hit_tokens, stats.prefix_cache_queries),
            "spared": tier.computing_seconds - tier.wait_seconds if tier.computing_seconds else None,
            "loaded": tier.loaded_bytes,
            "loads_per_s": _rate(tier.loaded_bytes, tier.load_seconds),
            "saved": tier.saved_bytes,
            "saves_per_s": _rate(tier.saved_bytes, tier.save_seconds),
            "evicted": tier.num_evicted,
            **_store(stats, name),
        }
        for name, tier in list(stats.tiers.items())
        if name != HOST or capacity.num_cpu_blocks
    ]


def _rate(amount: float, of: float) -> float | None:
    return amount / of if of else None


def _store(stats: EngineStats, name: str) -> dict[str, Any]:
    store = stats.kv_stores.get(name)
    if store is None:
        return {"holds": None, "usable": True}
    return {"holds": store.num_bytes, "usable": bool(store.is_usable)}
