"""Figures of published KV events in /metrics."""

from __future__ import annotations

from running import run_server

from octavo.data.kv_event_figures import KVEventFigures


def test_metrics_count_events_and_batches_if_they_are_published() -> None:
    with run_server() as running, running.http() as http:
        stats = running.engine.core.metrics.stats
        assert "kv_event" not in http.get("/metrics").text
        stats.kv_events = KVEventFigures(num_events=7, num_batches=5, num_dropped_batches=2)
        lines = http.get("/metrics").text.splitlines()
    counts = [line.partition("{")[0] + line.partition("}")[2] for line in lines if line.startswith("octavo:kv_event")]
    assert counts == [
        "octavo:kv_events_total 7.0",
        "octavo:kv_event_batches_total 5.0",
        "octavo:kv_event_batches_dropped_total 2.0",
    ]
