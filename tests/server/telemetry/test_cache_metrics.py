"""What /metrics say of the tiers of the prefix cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from server.running import run_server


def test_what_host_memory_gave_is_told_by_tier_and_direction() -> None:
    with run_server() as running, running.http() as http:
        core = running.engine.core
        core.capacity = replace(core.capacity, kv_block_bytes=1000)
        stats: Any = core.metrics.stats
        stats.host_cache_hits, stats.host_cache_hit_blocks, stats.num_offloaded_blocks = 48, 3, 5
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
    assert told["octavo:host_cache_bytes_total", "out"] == 5000
    assert told["octavo:host_cache_bytes_total", "in"] == 3000
