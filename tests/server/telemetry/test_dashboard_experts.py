"""The work of experts in /metrics and in the dashboard."""

from __future__ import annotations

import array
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from fakes import FakeExecutor
from prometheus_client.parser import text_string_to_metric_families
from running import run_server
from test_dashboard import BODY, watching

from octavo.data.events import ExpertsComputed
from octavo.data.expert_stats import ExpertLoad, ExpertTokens
from octavo.data.metrics import EngineStats
from octavo.data.snapshot import Snapshot
from octavo.server.telemetry.dashboard.experts import ExpertMap
from octavo.server.telemetry.dashboard.view import LiveView

if TYPE_CHECKING:
    from octavo.data.model_output import ModelOutput

LOAD = ExpertLoad(num_tokens=12, num_reads=4, read_bytes=4000, imbalance=1.25)


class Mixture(FakeExecutor):
    """Reports the same work of experts in each step that computes a token."""

    def collect(self) -> ModelOutput:
        result = super().collect()
        return replace(result, experts=LOAD) if self._num_tokens else result


def expert_tokens(*counts: int, num_experts: int = 4) -> ExpertTokens:
    return ExpertTokens(num_experts, bytearray(array.array("q", counts).tobytes()))


def expert_samples(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if "expert" in sample.name]
    assert all(sample.labels["model_name"] == "fake" for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_metrics_and_dashboard_show_work_of_experts() -> None:
    executor = Mixture()
    with run_server(executor) as running, running.http() as http, watching(http) as feed:
        running.engine.core.metrics.stats.expert_tokens = expert_tokens(1, 0, 0, 3, 2, 2, 2, 2)
        frame = feed.until(lambda frame: frame["experts"] is not None)
        assert frame["experts"] == [[100, 0, 0, 300], [100, 100, 100, 100]]
        assert frame["moment"]["experts"] is None, "no step yet"
        with running.http() as other:
            other.post("/v1/completions", json=BODY).raise_for_status()
            frame = feed.until(lambda frame: frame["moment"]["experts"] is not None)
            text = other.get("/metrics").text
        assert frame["experts"] is None, "unchanged"
        assert frame["moment"]["experts"] == {"tokens_per_read": 3.0, "step_bytes": 4000, "imbalance": 1.25}
        count = executor.num_computing_steps
    assert count >= BODY["max_tokens"]  # type: ignore[operator]
    assert expert_samples(text) == {
        "octavo:expert_tokens_total": 12 * count,
        "octavo:expert_reads_total": 4 * count,
        "octavo:expert_read_bytes_total": 4000 * count,
        "octavo:expert_imbalance_count": count,
        "octavo:expert_imbalance_sum": 1.25 * count,
    }


def test_dense_model_has_no_expert_metrics() -> None:
    with run_server() as running, running.http() as http, watching(http) as feed:
        assert expert_samples(http.get("/metrics").text) == {}
        frame = feed.until(lambda _: True)
        assert (frame["experts"], frame["moment"]["experts"]) == (None, None)


def test_expert_map_is_sent_after_changes_only() -> None:
    shown, tokens = ExpertMap(), expert_tokens(0, 0, 0, 0, 1, 0, 0, 0)
    assert ExpertMap().changed(None) is None
    assert shown.changed(tokens) == [[0, 0, 0, 0], [400, 0, 0, 0]]
    assert shown.changed(tokens) is None
    tokens.counts[:8] = (1 << 40).to_bytes(8, sys.byteorder)
    assert shown.changed(tokens) == [[400, 0, 0, 0], [400, 0, 0, 0]]


def test_live_view_sums_experts_of_last_seconds() -> None:
    now = 100.0
    view = LiveView(lambda: now)
    light = ExpertLoad(num_tokens=4, num_reads=4, read_bytes=1000, imbalance=1.75)
    view.take(Snapshot([ExpertsComputed(1, 99.1, LOAD), ExpertsComputed(2, 99.9, light)]))
    assert view.moment()["experts"] == {"tokens_per_read": 2.0, "step_bytes": 2500, "imbalance": 1.5}
    assert view._seconds[99].row(99)[12] == 5000
    now = 130.0
    assert view.moment()["experts"] is None


def test_engine_process_sends_expert_tokens_as_bytes() -> None:
    stats = EngineStats(expert_tokens=expert_tokens(1 << 40, 2))
    stats.experts.add(LOAD)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    assert (sent.expert_tokens, sent.experts) == (stats.expert_tokens, stats.experts)
