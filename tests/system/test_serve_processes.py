"""`octavo serve` as a user starts it, on the built-in model: its engine is killed and frozen, and the server is ended.

Figure 4 of the house's promises: every request ends within 10 s, not ready within 5 s, no orphans, right tokens. Other
tests cover facts that operators rely on, through both processes: figures, keys and deadlines. All use one server.
"""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_process import STORY, SUM, Stream, serve_lasting

from octavo.http.tenants import Tenant, add_key


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def audit_file(tmp_path_factory):
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def servers(keys_file, audit_file):
    key = add_key(keys_file, Tenant(name="alice", weight=2.0, read_metrics=True))
    options = ("--api-keys", str(keys_file), "--log-format", "json", "--audit-log", str(audit_file))
    with serve_lasting("--host", "0.0.0.0", *options, key=key) as running:
        yield running


@pytest.fixture
def served(servers):
    """Run a server that outlives its engines, on all addresses and with keys."""
    return servers()


def figures(served) -> dict[str, float]:
    """Return the sum of each figure over its labels."""
    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return totals


def test_server_exports_metrics_of_engine_process(served):
    before = figures(served)
    assert served.answer() == "12 + 30 = 42"
    served.wait_until(lambda: figures(served)["octavo:request_success_total"] > 0, 5)
    after = figures(served)
    assert after["octavo:generation_tokens_total"] - before["octavo:generation_tokens_total"] == 9
    assert after["octavo:time_to_first_token_seconds_count"] == after["octavo:e2e_request_latency_seconds_count"] >= 1
    assert 0 < after["octavo:time_to_first_token_seconds_sum"] <= after["octavo:e2e_request_latency_seconds_sum"]
    assert after["octavo:kv_cache_usage_perc"] == after["octavo:num_requests_running"] == 0
    assert after["octavo:engine_ready"] == 1


@pytest.mark.turn(12)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_figure_4_killed_or_frozen_engine_restarts_with_reset_metrics(served, kind):
    assert served.answer() == "12 + 30 = 42"
    served.wait_until(lambda: figures(served)["octavo:generation_tokens_total"] > 0, 5)
    num_restarts = figures(served)["octavo:engine_restarts_total"]
    streams, engine = [Stream(served, num_stories=16) for _ in range(3)], served.engine
    engine.send_signal(kind)
    served.wait_until(lambda: not served.is_ready(), 7)  # a frozen engine is killed after 8 s
    assert figures(served)["octavo:engine_ready"] == 0
    for stream in streams:
        stream.ended_within(10)
        assert stream.events[-1] == "[DONE]"
        error = json.loads(stream.events[-2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_restarting")
    assert served.http.get("/live").status_code == 200
    served.wait_until(lambda: figures(served)["octavo:engine_restarts_total"] == num_restarts + 1, 5)
    served.wait_for(served.is_ready)
    assert served.engine.pid != engine.pid
    assert figures(served)["octavo:generation_tokens_total"] == 0
    assert served.answer() == "12 + 30 = 42"
    assert not psutil.pid_exists(engine.pid)


def test_s2_server_and_engine_listen_only_on_api_port(served):
    served.answer()
    processes = [psutil.Process(served.process.pid), served.engine]
    listening = [
        (each.laddr.ip, each.laddr.port)
        for process in processes
        for each in process.net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
    ]
    assert listening == [("0.0.0.0", served.http.base_url.port)]


def test_sighup_reloads_key_file(served, keys_file):
    new = add_key(keys_file, Tenant(name="bob"))
    headers = {"Authorization": f"Bearer {new}"}
    assert served.http.get("/v1/models", headers=headers).status_code == 401
    served.process.send_signal(signal.SIGHUP)
    served.wait_until(lambda: served.http.get("/v1/models", headers=headers).status_code == 200, 5)
    assert served.answer() == "12 + 30 = 42"


def test_json_schema_constrains_chat_answer(served):
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": {**schema, "additionalProperties": False}},
    }
    response = served.http.post("/v1/chat/completions", json={**SUM, "response_format": wanted})
    answer = json.loads(response.json()["choices"][0]["message"]["content"])
    assert list(answer) == ["sum"]
    assert 0 <= answer["sum"] <= 99


@pytest.mark.parametrize(
    "structure",
    [
        {"json_object": 1},
        {"json_object": 0, "regex": "a"},
        {"regex": "(a"},
        {"json": {"type": "nothing"}},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(20_000)) + '\na20000: "x"'},
    ],
)
def test_s12_invalid_structured_outputs_are_refused_and_engine_survives(served, structure):
    engine, body = served.engine.pid, {"prompt": "a", "max_tokens": 3, "structured_outputs": structure}
    for stream in (False, True):
        response = served.http.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "structured_outputs"
    assert served.answer() == "12 + 30 = 42"
    assert served.engine.pid == engine


EMPTY_OR_BAD = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[1, 2], []]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [1, 2**31]}, "prompt"),
    ("/v1/completions", {"prompt": [2**63]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [2**31]}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"2147483648": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": [[-1]]}, "input"),
    ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "parameter"), EMPTY_OR_BAD)
def test_s12_empty_prompts_and_bad_token_ids_are_refused_without_crash(served, path, body, parameter):
    server, engine = served.process.pid, served.engine
    started = engine.create_time()
    for stream in (False, True):
        response = served.http.post(path, json={**body, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == parameter
    assert served.answer() == "12 + 30 = 42"
    assert (served.process.pid, served.engine.pid, served.engine.create_time()) == (server, engine.pid, started)


@pytest.mark.parametrize("depth", [4000, 4900])
def test_s13_long_chain_of_grammar_rules_crashes_no_process(served, depth):
    """It was a stack overflow, which no handler can catch."""
    chain = "start: a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(depth)) + f'\na{depth}: "x"'
    assert len(chain) < 1 << 16
    engine, body = served.engine.pid, {"prompt": "a", "max_tokens": 3, "structured_outputs": {"grammar": chain}}
    assert served.http.post("/v1/completions", json=body).status_code in {200, 400}
    assert served.answer() == "12 + 30 = 42"
    assert served.engine.pid == engine


def test_request_timeout_answers_504_and_aborts_in_engine(served):
    body = {**STORY, "stream": False, "n": 16}  # no machine writes 16 stories in 0.2 s
    response = served.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.2"})
    assert response.status_code == 504
    served.wait_until(lambda: figures(served)["octavo:num_requests_running"] == 0, 5)


def test_json_logs_and_audit_log_contain_request_id(served, audit_file):
    """Lines of both processes: about settings, about a request, about an engine that an earlier test killed."""
    body = {"prompt": "a", "max_tokens": 1, "no_such_field": 1}
    served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "find-me"})
    served.wait_until(lambda: any("no_such_field" in line for line in served.log), 5)
    lines = [json.loads(line) for line in served.log]
    assert all(line["time"] and line["level"] and line["logger"] for line in lines)
    assert [line["request_id"] for line in lines if "no_such_field" in line.get("message", "")] == ["find-me"]
    assert "octavo.audit" not in {line["logger"] for line in lines}
    served.wait_until(lambda: "find-me" in audit_file.read_text(), 5)
    audited = [json.loads(line) for line in audit_file.read_text().splitlines()]
    (line,) = [line for line in audited if line["request_id"] == "find-me"]
    assert (line["logger"], line["key"], line["status"]) == ("octavo.audit", "alice", 200)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=lambda kind: kind.name)
def test_f26_terminated_server_ends_streams_and_engine(served, kind):
    stream, engine, num_told = Stream(served, num_stories=16), served.engine, len(served.log)
    served.process.send_signal(kind)
    stream.ended_within(15)
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["error"]["code"] == "server_closing"
    assert served.process.wait(10) == 0
    assert not engine.is_running()
    assert "Traceback" not in "".join(served.log[num_told:])
