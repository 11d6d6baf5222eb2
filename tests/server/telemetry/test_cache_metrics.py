"""The tiers of the KV cache in /metrics and in the dashboard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from running import run_server

from octavo.config import CacheConfig, SchedulerConfig
from octavo.data.capacity import EngineCapacity, KVGroupCapacity
from octavo.data.kv_store_figures import KVStoreFigures
from octavo.data.kv_tier_figures import KVTierFigures
from octavo.data.metrics import EngineStats
from octavo.data.state_slots import StateSlots
from octavo.server.telemetry.dashboard.prefixes import prefix_figures
from octavo.server.telemetry.dashboard.tiers import tier_rows
from octavo.server.telemetry.metrics import _stores, _tiers


def test_metrics_report_host_cache_by_tier_and_direction() -> None:
    with run_server() as running, running.http() as http:
        core = running.engine.core
        windows = KVGroupCapacity("sliding_window", 9, 300)
        core.capacity = replace(core.capacity, kv_block_bytes=1000, bounded_groups=(windows,))
        stats: Any = core.metrics.stats
        stats.host_cache_hits, stats.host_cache_hit_blocks, stats.num_offloaded_blocks = 48, 3, 5
        stats.host_cache_hit_parts, stats.num_offloaded_parts = {1: 2}, {1: 4}
        stats.tiers["device"].num_evicted, stats.tiers["host"].num_evicted = 9, 2
        text = http.get("/metrics").text
    told = {
        (sample.name, *(sample.labels[key] for key in ("tier", "direction") if key in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert told["octavo:host_cache_hits_total",] == 48
    assert told["octavo:host_cache_hit_blocks_total",] == 3
    assert told["octavo:offloaded_blocks_total",] == 5
    assert told["octavo:evicted_blocks_total", "device"] == 9
    assert told["octavo:evicted_blocks_total", "host"] == 2
    assert told["octavo:host_cache_bytes_total", "out"] == 6200
    assert told["octavo:host_cache_bytes_total", "in"] == 3600


def capacity(num_host_blocks: int = 0) -> EngineCapacity:
    scheduler = SchedulerConfig().resolved()
    return EngineCapacity.of(scheduler, CacheConfig(), num_blocks=10, num_host_blocks=num_host_blocks)


def figures() -> EngineStats:
    stats = EngineStats(prefix_cache_queries=1000, kv_stores={"disk": KVStoreFigures(num_bytes=700, is_usable=0)})
    stats.tiers["disk"] = KVTierFigures(250, 4, 400, 0.5, 8, 800, 4.0, 3, 1.5, 9.0)
    stats.tiers["device"].num_hit_tokens = 500
    return stats


def test_metrics_label_each_kv_tier() -> None:
    told = {
        (sample.name.removeprefix("octavo:"), sample.labels["tier"]): sample.value
        for family in _tiers(figures(), capacity(), ["model"])
        for sample in family.samples
        if "tier" in sample.labels
    }
    of_disk = {name: value for (name, tier), value in told.items() if tier == "disk"}
    assert of_disk == {
        "kv_tier_hit_tokens_total": 250,
        "kv_tier_loaded_blocks_total": 4,
        "kv_tier_loaded_bytes_total": 400,
        "kv_tier_load_seconds_total": 0.5,
        "kv_tier_saved_blocks_total": 8,
        "kv_tier_saved_bytes_total": 800,
        "kv_tier_save_seconds_total": 4.0,
        "evicted_blocks_total": 3,
        "kv_tier_wait_seconds_total": 1.5,
        "kv_tier_computing_seconds_total": 9.0,
    }
    assert (told["kv_tier_hit_tokens_total", "device"], told["kv_tier_hit_tokens_total", "host"]) == (500, 0)


def test_dashboard_tier_rows_have_rates_and_store_size() -> None:
    device, disk = tier_rows(figures(), capacity())
    assert device == {
        "name": "device",
        "hit_rate": 0.5,
        "spared": None,
        "loaded": 0,
        "loads_per_s": None,
        "saved": 0,
        "saves_per_s": None,
        "evicted": 0,
        "holds": None,
        "usable": True,
    }
    assert disk == {
        "name": "disk",
        "hit_rate": 0.25,
        "spared": 7.5,
        "loaded": 400,
        "loads_per_s": 800,
        "saved": 800,
        "saves_per_s": 200,
        "evicted": 3,
        "holds": 700,
        "usable": False,
    }
    names = [row["name"] for row in tier_rows(EngineStats(), capacity(5))]
    assert names == ["device", "host"]
    assert tier_rows(EngineStats(), capacity())[0]["hit_rate"] is None


def test_metrics_count_kv_saves_by_outcome() -> None:
    stats = EngineStats()
    stats.kv_saves["expired"] = 3
    told = {
        (sample.name, sample.labels["outcome"]): sample.value
        for family in _stores(stats, ["model"])
        for sample in family.samples
        if "outcome" in sample.labels
    }
    assert told["octavo:kv_saves_total", "expired"] == 3
    assert told["octavo:kv_saves_total", "done"] == told["octavo:kv_loads_total", "cancelled"] == 0


def metrics_of(running: Any, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of /metrics by name and the values of some labels."""
    with running.http() as http:
        text = http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (each.name.removeprefix("octavo:"), *(each.labels[key] for key in labels if key in each.labels)): each.value
        for each in samples
    }


def test_metrics_report_unusable_tokens_and_states() -> None:
    with run_server() as running:
        core = running.engine.core
        stats: Any = core.metrics.stats
        stats.prefix_cache_unusable["window"], stats.prefix_cache_unusable["checkpoint"] = 16, 48
        without = metrics_of(running, "limit", "use")
        core.capacity = replace(core.capacity, bounded_groups=(KVGroupCapacity("recurrent_states", 9, 300),))
        before = metrics_of(running, "limit", "use")
        stats.state_slots, stats.num_saved_checkpoints, stats.num_evicted_checkpoints = StateSlots(2, 4, 3), 7, 3
        told = metrics_of(running, "limit", "use")
    unusable = "prefix_cache_unusable_tokens_total"
    assert (without[unusable, "window"], without[unusable, "checkpoint"]) == (16, 48)
    assert not [name for name in without if name[0].startswith("state_slots") or "checkpoints" in name[0]]
    assert [before["state_slots", use] for use in ("running", "checkpoint", "free")] == [0, 0, 9]
    assert [told["state_slots", use] for use in ("running", "checkpoint", "free")] == [2, 4, 3]
    assert (told["saved_checkpoints_total",], told["evicted_checkpoints_total",]) == (7, 3)


def test_dashboard_shows_unusable_tokens_and_states() -> None:
    stats = figures()
    assert prefix_figures(stats, capacity()) == {"unusable": {"window": 0, "checkpoint": 0}, "states": None}
    stats.prefix_cache_unusable["checkpoint"] = 5
    stats.num_saved_checkpoints, stats.num_evicted_checkpoints = 7, 3
    recurrent = replace(capacity(), bounded_groups=(KVGroupCapacity("recurrent_states", 9, 300),))
    shown = prefix_figures(stats, recurrent)
    states = {"running": 0, "checkpoints": 0, "free": 9, "saved": 7, "evicted": 3}
    assert shown == {"unusable": {"window": 0, "checkpoint": 5}, "states": states}
    stats.state_slots = StateSlots(2, 4, 3)
    assert prefix_figures(stats, recurrent)["states"] == {**states, "running": 2, "checkpoints": 4, "free": 3}
