"""The load of an engine in the forms of vLLM and SGLang."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import run_server

from octavo import __version__
from octavo.data.capacity import KVGroupCapacity
from octavo.engine.local_core import LocalCore
from octavo.http.tenants import Tenant, add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running import Running

CORE = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "num_waiting_uncached_tokens": 300,
    "num_used_tokens": 640,
    "num_total_tokens": 1040,
    "max_total_num_tokens": 2560,
    "max_running_requests": 8,
    "token_usage": 0.25,
    "cache_hit_rate": 0.25,
}
MEMORY = {"kv_cache_gb": 2.5, "token_capacity": 2560}
SPECULATIVE = {"accept_length": 2.5, "accept_rate": 0.75}
SECTIONS: dict[str, dict[str, Any]] = {
    "memory": {"memory": MEMORY},
    "spec": {"speculative": SPECULATIVE},
    "lora": {},
    "disagg": {"disaggregation": {"mode": "decode"}},
    "queues": {"queues": {"waiting": 2}},
}
ALL = {**CORE, **{name: figures for section in SECTIONS.values() for name, figures in section.items()}}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Running]:
    """A server with invented figures. Nothing runs, so they stay."""
    with run_server() as running:
        core = running.engine.core
        core.capacity = replace(
            core.capacity,
            max_num_seqs=8,
            num_gpu_blocks=160,
            block_size=16,
            kv_block_bytes=10 << 20,
            bounded_groups=(KVGroupCapacity("sliding_window", 48, 20 << 20),),
            role="decode",
        )
        stats: Any = core.metrics.stats
        stats.num_requests_running, stats.num_requests_waiting, stats.num_waiting_tokens = 3, 2, 400
        stats.kv_cache_usage, stats.prefix_cache_queries, stats.prefix_cache_hits = 0.25, 1000, 250
        stats.drafts.num_drafts, stats.drafts.num_draft_tokens, stats.drafts.num_accepted_tokens = 10, 20, 15
        yield running


def test_load_counts_running_and_waiting_requests(loaded: Running) -> None:
    with loaded.http() as http:
        assert http.get("/load").json() == {"server_load": 5}


def test_loads_have_all_sections_by_default(loaded: Running) -> None:
    with loaded.http() as http:
        told = http.get("/v1/loads").json()
        assert http.get("/v1/loads?include=&dp_rank=0&format=json").json()["loads"] == told["loads"]
    assert told.keys() == {"timestamp", "version", "loads"}
    assert told["loads"] == [ALL]
    assert told["version"] == __version__
    assert datetime.fromisoformat(told["timestamp"]).utcoffset() is not None


@pytest.mark.parametrize("include", ["core", *SECTIONS, "core,memory", "queues, spec", "spec,all"])
def test_include_selects_sections(loaded: Running, include: str) -> None:
    expected = dict(CORE)
    for name in include.replace(" ", "").split(","):
        expected |= ALL if name == "all" else SECTIONS.get(name, {})
    with loaded.http() as http:
        assert http.get("/v1/loads", params={"include": include}).json()["loads"] == [expected]


def test_prometheus_format_has_sglangs_names(loaded: Running) -> None:
    with loaded.http() as http:
        answer = http.get("/v1/loads?format=prometheus")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    told = {family.name: family.samples for family in text_string_to_metric_families(answer.text)}
    figures = {name: value for name, value in CORE.items() if name != "dp_rank"}
    figures |= {f"memory_{name}": value for name, value in MEMORY.items()}
    figures |= {f"spec_{name}": value for name, value in SPECULATIVE.items()}
    figures["queues_waiting"] = 2
    assert {name: (each.value, each.labels) for name, [each] in told.items()} == {
        f"sglang_{name}": (value, {"dp_rank": "0"}) for name, value in figures.items()
    }


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("include=core,gpu", "include must be core or memory or spec or disagg or queues or lora or all, got 'gpu'"),
        ("dp_rank=1", "dp_rank must be 0, got '1'"),
        ("dp_rank=-1", "dp_rank must be 0, got '-1'"),
        ("dp_rank=a", "dp_rank must be 0, got 'a'"),
        ("format=xml", "format must be json or prometheus, got 'xml'"),
    ],
)
def test_unknown_value_is_refused_by_name(loaded: Running, query: str, message: str) -> None:
    with loaded.http() as http:
        answer = http.get(f"/v1/loads?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_idle_engine_without_drafts_reports_zeros() -> None:
    with run_server() as running, running.http() as http:
        [told] = http.get("/v1/loads").json()["loads"]
        assert http.get("/load").json() == {"server_load": 0}
    assert told["num_running_reqs"] == told["num_total_tokens"] == told["cache_hit_rate"] == 0
    assert told["disaggregation"] == {"mode": "null"}
    assert "speculative" not in told


@pytest.mark.parametrize("path", ["/load", "/v1/loads"])
def test_restarting_engine_does_not_look_idle(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with run_server() as running, running.http() as http:
        monkeypatch.setattr(LocalCore, "is_ready", False)
        answer = http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("path", ["/load", "/v1/loads"])
def test_loads_require_key_with_read_metrics(tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys.toml"
    may, may_not = add_key(keys, Tenant(name="a", read_metrics=True)), add_key(keys, Tenant(name="b"))
    with run_server(api_keys_file=keys) as running, running.http() as http:
        assert http.get(path, headers={"Authorization": f"Bearer {may}"}).status_code == 200
        assert http.get(path, headers={"Authorization": f"Bearer {may_not}"}).status_code == 403
        assert http.get(path).status_code == 401


def test_openapi_lists_query_parameters_and_text(loaded: Running) -> None:
    with loaded.http() as http:
        operation = http.get("/openapi.json").json()["paths"]["/v1/loads"]["get"]
    assert [(each["name"], each["in"]) for each in operation["parameters"]] == [
        ("include", "query"),
        ("dp_rank", "query"),
        ("format", "query"),
    ]
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/plain"}
    assert "400" in operation["responses"]
