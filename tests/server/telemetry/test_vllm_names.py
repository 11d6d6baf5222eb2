"""Metrics under vLLM's names, on a real server."""

from __future__ import annotations

from itertools import product

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import run_server

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.telemetry.vllm_names import VLLM_NAMES

Told = dict[tuple[str, frozenset[tuple[str, str]]], float]  # value by name and labels
BODY = {"prompt": "Where is the fox?", "max_tokens": 5}
# What llm-d's scheduler reads, and the panels of vLLM's own dashboard (vLLM 0.33).
READ_BY_OTHERS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
}


def samples(prefix: str) -> Told:
    with run_server(metrics_prefix=prefix) as running, running.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        tiers = running.engine.core.metrics.stats.tiers
        tiers["device"].num_hit_tokens, tiers["host"].num_hit_tokens = 7, 100
        text = http.get("/metrics").text
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == (prefix != "octavo")
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(("octavo:", "vllm:"))
    }


def names_of(told: Told) -> set[str]:
    return {name for name, _ in told}


@pytest.fixture(scope="module")
def both() -> Told:
    return samples("both")


def test_vllm_metrics_have_vllms_labels_and_octavos_values(
    both: Told,
) -> None:
    assert names_of(both) >= READ_BY_OTHERS
    assert both["vllm:generation_tokens_total", frozenset({("model_name", "fake"), ("engine", "0")})] == 5
    ours = {(name, labels): value for (name, labels), value in both.items() if name.startswith("octavo:")}
    for (name, labels), value in both.items():
        if not name.startswith("vllm:"):
            continue
        assert ("engine", "0") in labels
        assert ("model_name", "fake") in labels
        if name.startswith(("vllm:cache_config", "vllm:prefix_cache_hits", "vllm:time_per_output")):
            continue
        same = (name.replace("vllm:", "octavo:"), labels - {("engine", "0")})
        assert ours[same] == value, name


def test_cache_config_has_labels_that_schedulers_read(
    both: Told,
) -> None:
    [(labels, value)] = [(dict(labels), value) for (name, labels), value in both.items() if "vllm:cache_config" in name]
    assert value == 1
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) > 0
    assert labels["cache_dtype"] == "auto"
    assert labels["enable_prefix_caching"] == "True"


def test_vllm_prefix_cache_hits_exclude_host_memory(
    both: Told,
) -> None:
    labels = frozenset({("model_name", "fake"), ("engine", "0")})
    assert both["vllm:prefix_cache_hits_total", labels] == 7


def test_each_prefix_has_its_names(both: Told) -> None:
    octavo, vllm = names_of(samples("octavo")), names_of(samples("vllm"))
    assert octavo == {name for name in names_of(both) if name.startswith("octavo:")}
    assert {name for name in vllm if name.startswith("vllm:")} == names_of(both) - octavo
    parts = ("", "_total", "_bucket", "_sum", "_count")
    replaced = {f"octavo:{each.source}{part}" for each, part in product(VLLM_NAMES, parts) if each.only is None}
    assert octavo - vllm == octavo & replaced
    assert {"octavo:engine_ready", "octavo:prefix_cache_hits_total", "octavo:kv_tier_hit_tokens_total"} <= vllm


def test_unknown_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics_prefix must be one of octavo, vllm, both, got 'sglang'"):
        ServerConfig(metrics_prefix="sglang")
