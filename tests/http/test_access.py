"""Keys, host names and origins over HTTP: accepted requests, their tenants, and the logs and counters about them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx
import pytest
from fakes import FakeExecutor
from running import DEADLINE_S, ask_as_written, asking, let_time_pass, run_server, wait_until
from scripted_drafts import verify_all

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.http.errors import CLIENT_DISCONNECTED
from octavo.http.tenants import Tenant, add_key
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.runtime import logs
from octavo.server.answers.usage import UsageCounter
from octavo.server.app import create_app
from octavo.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello, this is a prompt of several blocks of sixteen tokens each", "max_tokens": 3}
KEYS: dict[str, str] = {}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    for tenant in (
        Tenant(name="alice", read_metrics=True),
        Tenant(name="bob"),
        Tenant(name="one", max_concurrency=1),
        Tenant(name="few", requests_per_minute=2),
        Tenant(name="tokens", tokens_per_minute=60),
        Tenant(name="open1", share_prefix_cache=True),
        Tenant(name="open2", share_prefix_cache=True),
    ):
        KEYS[tenant.name] = add_key(path, tenant)
    return path


@pytest.fixture(scope="module")
def tenants(keys_file: Path) -> Iterator[Running]:
    with run_server(api_keys_file=keys_file, engine_options={"policy": "fair"}) as running:
        yield running


def cached_tokens(http: httpx.Client, key: str, **fields: Any) -> int:
    response = http.post(COMPLETIONS, json={**BODY, **fields}, headers=bearer(key))
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_s18_prefix_hits_stay_within_key_unless_shared(tenants: Running) -> None:
    with tenants.http() as http:
        assert cached_tokens(http, KEYS["alice"]) == 0
        assert cached_tokens(http, KEYS["alice"]) == 64 - 1  # the last token is always computed
        assert cached_tokens(http, KEYS["bob"]) == 0
        assert cached_tokens(http, KEYS["bob"], cache_salt="alice") == 0
        assert cached_tokens(http, KEYS["open1"]) == 0
        assert cached_tokens(http, KEYS["open2"]) > 0


def test_limits_of_key_are_enforced(tenants: Running) -> None:
    with tenants.http() as http:
        response = http.post(COMPLETIONS, json={**BODY, "n": 2}, headers=bearer(KEYS["one"]))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")  # not 429: retrying is useless
        for expected in (200, 200, 429):
            response = http.post(COMPLETIONS, json=BODY, headers=bearer(KEYS["few"]))
            assert response.status_code == expected
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert http.post(COMPLETIONS, json=BODY, headers=bearer(KEYS["one"])).status_code == 200


def test_disconnected_client_is_charged_for_prompt(tenants: Running) -> None:
    """The tokens are charged before the first output, so a client that disconnects early pays too."""
    tenants.executor.gate.clear()
    try:
        with asking(tenants, COMPLETIONS, BODY, **bearer(KEYS["tokens"])):
            wait_until(lambda: tenants.num_blocks_in_use, "it is computed")
    finally:
        tenants.executor.gate.set()
    with tenants.http() as http:
        response = http.post(COMPLETIONS, json=BODY, headers=bearer(KEYS["tokens"]))
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.turn(8)
def test_disconnected_client_is_charged_for_generated_tokens(tmp_path: Path) -> None:
    """The tokens are charged while they are generated, so a client that disconnects early pays too."""
    path = tmp_path / "keys.toml"
    key = bearer(add_key(path, Tenant(name="hasty", tokens_per_minute=20)))
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor, api_keys_file=path) as running, running.http() as http:
        body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
        with asking(running, COMPLETIONS, body, **key):
            wait_until(lambda: executor.num_steps > 50, "it has cost more than it may")

        def account() -> Any:
            return running.server._service.limiter._accounts["hasty"].tokens

        wait_until(lambda: account().wait_s(1, time.monotonic()) > 0, "it is in debt")
        response = http.post(COMPLETIONS, json={**body, "max_tokens": 1}, headers=key)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_metrics_count_tokens_per_tenant(tenants: Running) -> None:
    with tenants.http() as http:
        http.post(COMPLETIONS, json=BODY, headers=bearer(KEYS["bob"]))
        text = http.get("/metrics", headers=bearer(KEYS["alice"])).text
        refused = http.get("/metrics", headers=bearer(KEYS["bob"]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    assert 'octavo:tenant_tokens_total{kind="generation",model_name="fake",tenant="bob"}' in text
    assert KEYS["bob"] not in text


def routes() -> list[tuple[str, str]]:
    """Return every route of the application, so that new routes are tested too."""
    with run_server() as running:
        app = create_app(Service(running.server._service.engine))
    return [
        (method, route.path.replace("{name:path}", "fake"))
        for route in app.routes
        for method in sorted(getattr(route, "methods", ()) or ())
    ]


def test_s6_every_route_except_health_requires_key(tenants: Running) -> None:
    known = routes()
    assert ("POST", "/v1/chat/completions") in known
    assert ("GET", "/metrics") in known
    with tenants.http() as http:
        for method, path in known:
            for headers in (
                {},
                bearer("wrong"),
                {"Authorization": "Bearer"},
                {"Authorization": KEYS["alice"]},
                bearer(KEYS["alice"][:-1]),
            ):
                response = http.request(method, path, headers=headers, json={})
                if path in {"/health", "/live", "/ready"}:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, (method, path)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("host", ["evil", "127.0.0.1/health", "/health", "health:80", ""])
@pytest.mark.parametrize(
    "path",
    [
        "//health/../v1/models",
        "//v1/models",
        "/v1/models/../../health/..",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/./v1/models",
        "//health",
        "/health/",
        "/Health",
        "/health%00",
        "/health;v1/models",
        "/v1%2fmodels",
        "/V1/models",
        "/v1/models?/health",
        "/v1/models#/health",
        "http://127.0.0.1/v1/models",
    ],
)
def test_s5_no_host_or_path_bypasses_key_check(
    tenants: Running, host: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    with tenants.http() as http:
        assert ask_as_written(http, path, headers={"Host": host}).status_code == 401
    wait_until(lambda: audited(caplog), "it is written down")
    arrived = unquote(path.removeprefix("http://127.0.0.1").partition("?")[0].partition("#")[0])
    assert [line["path"] for line in audited(caplog)] == [arrived], "nobody tidied it up on its way"


def reload(running: Running) -> None:
    """Reload the keys as SIGHUP does, on the server's event loop."""
    done = threading.Event()

    def run() -> None:
        running.server.reload()
        done.set()

    running.server.servers[0].get_loop().call_soon_threadsafe(run)
    assert done.wait(DEADLINE_S)


def test_keys_are_reloaded_and_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    old = add_key(path, Tenant(name="old"))
    with run_server(api_keys_file=path) as running, running.http() as http:
        assert http.get("/version", headers=bearer(old)).status_code == 200
        path.write_text("[keys")
        reload(running)
        assert http.get("/version", headers=bearer(old)).status_code == 200
        path.unlink()
        new = add_key(path, Tenant(name="new"))
        reload(running)
        assert http.get("/version", headers=bearer(old)).status_code == 401
        assert http.get("/version", headers=bearer(new)).status_code == 200


def test_removed_key_ends_its_open_streams(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    kept = add_key(path, Tenant(name="kept"))
    before = path.read_text()
    gone = add_key(path, Tenant(name="gone", read_metrics=True))
    endless = {**BODY, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with run_server(FakeExecutor(step_s=0.005), api_keys_file=path) as running, running.http() as http:
        streams = [http.stream("POST", COMPLETIONS, json=endless, headers=bearer(key)) for key in (kept, gone)]
        watched = http.stream("GET", "/dashboard/events", headers=bearer(gone))
        with streams[0] as mine, streams[1] as theirs, watched as frames:
            lines = mine.iter_lines()
            next(lines)
            next(told := theirs.iter_lines())
            next(seen := frames.iter_lines())
            path.write_text(before)
            reload(running)
            assert '"code":"invalid_api_key"' in "".join(told)
            assert "event: bye" in list(seen)
            assert running.num_unfinished == 1  # the request with the remaining key continues
            next(lines)


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    origins = ("https://GOOD.org/",)
    with run_server(allowed_hosts=("LocalHost", "127.0.0.1", "::1"), allowed_origins=origins) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.org", 421),
        ("localhost.evil.org", 421),
        ("evil.org:80@localhost", 421),
        ("localhost/evil", 421),
        ("[foo]", 421),
        ("[::zz]", 421),
        ("x[1]", 421),
        ("", 421),
    ],
)
def test_s21_rebound_host_name_is_refused(named: Running, host: str, status: int) -> None:
    with named.http() as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("path", ["/health", "/live", "/ready"])
def test_health_probes_by_address_are_answered(named: Running, path: str) -> None:
    with named.http() as http:
        assert http.get(path, headers={"Host": "10.1.2.3:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("https://good.org", 200),
        ("http://127.0.0.1:{port}", 200),
        ("https://evil.org", 403),
        ("https://good.org.evil.org", 403),
        ("http://good.org", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
    ],
)
def test_s21_pages_of_other_origins_are_refused(named: Running, origin: str | None, status: int) -> None:
    port = named.url.rpartition(":")[2]
    headers = {} if origin is None else {"Origin": origin.format(port=port)}
    with named.http() as http:
        response = http.post(COMPLETIONS, json=BODY, headers=headers)
        form = http.post(COMPLETIONS, json=BODY, headers={**headers, "Content-Type": "text/plain"})
    assert form.status_code == (415 if status == 200 else status), "a browser sends it without asking"
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (
        "https://good.org" if origin == "https://good.org" else None
    )


def test_preflight_allows_only_configured_origin(named: Running) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with named.http() as http:
        good = http.options(COMPLETIONS, headers={"Origin": "https://good.org", **asked})
        bad = http.options(COMPLETIONS, headers={"Origin": "https://evil.org", **asked})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://good.org"
    assert bad.status_code == 400
    assert "access-control-allow-origin" not in bad.headers


def test_every_response_has_request_id(shared: Running) -> None:
    with shared.http() as http:
        assert http.get("/version", headers={"X-Request-Id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
        made = [http.get(path).headers["x-request-id"] for path in ("/version", "/nothing")]
        assert len(set(made)) == 2
        odd = http.get("/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
        assert len(odd) == 32


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "octavo.audit"]


def test_polled_routes_are_audited_only_if_refused(tenants: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    with tenants.http() as http:
        for path in ("/health", "/ready", "/metrics", "/model_info", "/version"):
            assert http.get(path, headers=bearer(KEYS["alice"])).status_code == 200
        assert http.get("/model_info").status_code == 401
    wait_until(lambda: len(audited(caplog)) == 2, "both are written down")
    assert [(line["path"], line["status"]) for line in audited(caplog)] == [("/version", 200), ("/model_info", 401)]


def test_log_lines_of_request_have_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(logs.JsonFormatter().format(record)))

    keeper, logger = Keeper(), logging.getLogger("octavo")
    logger.addHandler(keeper)
    try:
        with run_server() as running, running.http() as http:
            monkeypatch.setattr(running.server._service, "check_model", lambda _: 1 / 0)
            headers = {"X-Request-Id": "the-one-that-failed"}
            assert http.post(COMPLETIONS, json={"prompt": "hello"}, headers=headers).status_code == 500
    finally:
        logger.removeHandler(keeper)
    (failure,) = [line for line in lines if "ZeroDivisionError" in line.get("exception", "")]
    assert failure["request_id"] == "the-one-that-failed"


def test_each_request_has_one_audit_line_without_prompt_text(
    tenants: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    body = {"prompt": "hush, this is secret", "max_tokens": 3}
    with tenants.http() as http:
        http.post(COMPLETIONS, json=body, headers={**bearer(KEYS["alice"]), "X-Request-Id": "first"})
        http.post(COMPLETIONS, json={**body, "stream": True}, headers=bearer(KEYS["alice"]))
        http.post(COMPLETIONS, json=body, headers=bearer("stolen"))
        http.post(COMPLETIONS, json={"prompt": "hush", "n": -1}, headers=bearer(KEYS["bob"]))
        http.get("/health")
    wait_until(lambda: len(audited(caplog)) == 4, "all is written down")
    by_status = {line["status"]: line for line in audited(caplog)}  # the line is written when the request has ended
    stranger, wrong = by_status[401], by_status[400]
    answers = [line for line in audited(caplog) if line["status"] == 200]
    whole, stream = sorted(answers, key=lambda line: line["request_id"] != "first")
    assert whole["request_id"] == "first"
    for line in (whole, stream):
        assert (line["key"], line["status"], line["path"], line["model"]) == ("alice", 200, COMPLETIONS, "fake")
        assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (20, 3, ["length"])
        assert line["id"].startswith("cmpl-")
        assert line["seconds"] >= 0
    assert (whole["stream"], stream["stream"]) == (False, True)
    assert (stranger["status"], stranger["key"]) == (401, None)
    assert (wrong["status"], wrong["key"]) == (400, "bob")
    assert "hush" not in caplog.text
    assert not any(key in caplog.text for key in (*KEYS.values(), "stolen"))


@pytest.mark.parametrize(("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.0/8",), "192.0.2.7")])
def test_only_trusted_proxy_sets_client_address(
    trusted: tuple[str, ...], client: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # a variable of uvicorn, which octavo must ignore
    caplog.set_level(logging.INFO, logger="octavo.audit")
    with run_server(forwarded_allow_ips=trusted) as running, running.http() as http:
        http.get("/version", headers={"X-Forwarded-For": "192.0.2.7"})
        wait_until(lambda: audited(caplog), "it is written down")
    assert [line["client"] for line in audited(caplog)] == [client]


def test_forwarded_allow_ips_refuses_host_names() -> None:
    with pytest.raises(ConfigError, match="addresses or networks"):
        ServerConfig(forwarded_allow_ips=("proxy.example",))


def test_metrics_are_valid_prometheus_text(shared: Running) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with shared.http() as http:
        http.post(COMPLETIONS, json={**BODY, "max_tokens": 5})
        http.get("/made/up/path")
        http.request("MADEUP", COMPLETIONS)
        response = http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        openmetrics = http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("text/plain")
    assert openmetrics.text.endswith("# EOF\n")

    def value(family: str, sample: str | None = None, **labels: str) -> float:
        found = [
            each.value
            for each in families[family].samples
            if each.name == (sample or each.name) and labels.items() <= each.labels.items()
        ]
        return sum(found)

    assert value("octavo:generation_tokens", "octavo:generation_tokens_total") >= 5
    assert value("octavo:num_requests_running") == value("octavo:num_requests_waiting") == 0
    assert value("octavo:engine_ready") == 1
    capacity = shared.engine.client.capacity
    assert value("octavo:kv_cache_capacity_tokens") == capacity.kv_cache_tokens > 0
    assert value("octavo:max_batch_total_tokens") == capacity.max_batch_total_tokens
    assert value("octavo:max_batch_prefill_tokens") == capacity.max_batch_prefill_tokens
    assert value("octavo:cache_config_info", block_size="16", num_gpu_blocks=str(capacity.num_gpu_blocks)) == 1
    assert value("octavo:cache_config_info", num_window_blocks="0") == 1, "its layers have no windows"
    buckets = [s for s in families["octavo:time_to_first_token_seconds"].samples if s.name.endswith("_bucket")]
    counts = [each.value for each in buckets]
    assert counts == sorted(counts)
    assert buckets[-1].labels["le"] == "+Inf"
    assert counts[-1] == value("octavo:time_to_first_token_seconds", "octavo:time_to_first_token_seconds_count") >= 1
    handlers = {sample.labels["handler"] for sample in families["http_requests"].samples}
    assert COMPLETIONS in handlers
    assert "/made/up/path" not in handlers
    assert "MADEUP" not in {sample.labels["method"] for sample in families["http_requests"].samples}
    assert value("http_requests", "http_requests_total", handler="none", status="404") >= 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_usage_and_metrics_report_draft_tokens(path: str, asked: dict[str, Any]) -> None:
    body = {**asked, "model": "fake", "max_tokens": 8, "ignore_eos": True, "n": 2}
    with run_server(FakeExecutor(guesses=(True, True, False))) as running, running.http() as http:
        verify_all(running.engine)
        usage = http.post(path, json=body).json()["usage"]
        drafts, text = running.engine.core.metrics.stats.drafts, http.get("/metrics").text
        figures, places = astuple(drafts)[:3], list(drafts.num_accepted_tokens_per_pos)
        streamed = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    num_drafts, num_drafted, num_accepted = figures
    assert num_drafts >= 2
    assert places[0] >= 2
    assert places[2] == 0
    assert usage["completion_tokens"] == 16
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_drafted - num_accepted,
    }
    assert '"accepted_prediction_tokens":' in streamed
    for name, count in (
        ("num_drafts_total{", num_drafts),
        ("num_draft_tokens_total{", num_drafted),
        ("num_accepted_tokens_total{", num_accepted),
        ('num_accepted_tokens_per_pos_total{model_name="fake",position="0"', places[0]),
        ('num_accepted_tokens_per_pos_total{model_name="fake",position="2"', 0),
    ):
        [line] = [each for each in text.splitlines() if each.startswith(f"octavo:spec_decode_{name}")]
        assert line.endswith(f" {float(count)}"), line


def test_drafts_after_stop_string_are_not_counted_as_completion() -> None:
    body = {"prompt": "x", "max_tokens": 30, "stop": "c"}
    with run_server(FakeExecutor(answer="abcdefg", guesses=(True, True, True))) as running, running.http() as http:
        usage = http.post(COMPLETIONS, json=body).json()["usage"]
    assert usage["completion_tokens"] == 3  # a, then b, then c with the token after it
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
    assert usage["completion_tokens_details"] == details
    assert usage["receipt"]["wasted_tokens"] == 2


def test_queue_full_refusals_are_counted() -> None:
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor, max_open_requests=1) as running, running.http() as http:
        assert http.post(COMPLETIONS, json={**BODY, "n": 2}).status_code == 400
        with http.stream("POST", COMPLETIONS, json={**BODY, "max_tokens": 500, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert http.post(COMPLETIONS, json=BODY).json()["error"]["code"] == "queue_full"
        assert 'octavo:requests_refused_total{code="queue_full"} 1.0' in http.get("/metrics").text


def refusals(running: Running) -> Counter[str]:
    text = running.server._service.metrics.text("")[0].decode()
    return Counter({code: int(float(n)) for code, n in re.findall(r'requests_refused_total{code="(.*)"} (.*)', text)})


def send_raw(running: Running, data: bytes, *, behind: bytes | None = None) -> bytes:
    """Send bytes and return the answer. behind: path of a request that the same connection sends first."""
    url = httpx.URL(running.url)
    with socket.create_connection((url.host, url.port), timeout=DEADLINE_S) as sock:
        if behind is not None:
            sock.sendall(b"GET " + behind + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sock.recv(1 << 16)
        sock.sendall(data)
        return sock.recv(1 << 16)


def test_audit_line_of_timed_out_request_has_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor) as running, running.http() as http, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
        answer = pool.submit(http.post, COMPLETIONS, json=body, headers={"X-Request-Timeout": "100"})
        wait_until(lambda: executor.num_steps > 10, "it is computed")
        let_time_pass(running, 100)
        assert answer.result(DEADLINE_S).status_code == 504
        wait_until(lambda: audited(caplog), "it is written down")
    (line,) = audited(caplog)
    assert (line["status"], line["error"], line["model"]) == (504, "request_timeout", "fake")
    assert line["id"].startswith("cmpl-")
    assert line["prompt_tokens"] == 5
    assert line["completion_tokens"] > 5
    assert line["computed_tokens"] >= line["completion_tokens"]


def test_audit_line_of_request_ended_by_shutdown_has_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor) as running, running.http() as http, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
        answer = pool.submit(http.post, COMPLETIONS, json=body)
        service, loop = running.server._service, running.server.servers[0].get_loop()
        wait_until(lambda: executor.num_steps > 20, "it runs")
        asyncio.run_coroutine_threadsafe(service.drain(0.0), loop)
        assert answer.result(DEADLINE_S).status_code == 503
        wait_until(lambda: [line for line in audited(caplog) if "error" in line], "it is written down")
    (line,) = [line for line in audited(caplog) if "error" in line]
    assert (line["error"], line["prompt_tokens"]) == ("server_closing", 5)
    assert line["completion_tokens"] > 5


def test_usage_counts_finished_choices_once() -> None:
    """Every output of a request with several choices repeats the choices that ended earlier."""
    counter = UsageCounter()
    ended = CompletionOutput(0, "", [1], finish_reason="stop")
    for tokens, reason in (([2], None), ([], "error")):
        output = RequestOutput("0", None, [1, 2], [ended, CompletionOutput(1, "", tokens, finish_reason=reason)], False)
        counter.add(output, output.outputs)
        ended = replace(ended, token_ids=[])
    assert counter.summary()["finish_reasons"] == ["stop", "error"]
    assert counter.summary()["completion_tokens"] == 2


@pytest.mark.turn(12)
def test_each_refusal_is_counted_once_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Covers every place that refuses: connection, origins, keys, limiter, body, route and engine.

    The audit log has the same reasons.
    """
    caplog.set_level(logging.INFO, logger="octavo.audit")
    path = tmp_path / "keys.toml"
    key = bearer(add_key(path, Tenant(name="bob")))
    few = bearer(add_key(path, Tenant(name="few", requests_per_minute=1)))
    small = bearer(add_key(path, Tenant(name="small", max_concurrency=1)))
    lines = ("Host: localhost", "Content-Type: application/json", f"Authorization: {key['Authorization']}", "")
    head = "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", *lines]).encode()
    with run_server(api_keys_file=path, body_timeout_s=0.5, allowed_hosts=("127.0.0.1", "localhost")) as running:
        expected: Counter[str] = Counter()

        def check(reason: str, status: int, answer: httpx.Response | bytes) -> None:
            told = answer.status_code if isinstance(answer, httpx.Response) else int(answer.split()[1])
            assert told == status, reason
            expected[reason] += 1
            wait_until(lambda: refusals(running)[reason] == expected[reason], f"{reason} is counted")
            assert refusals(running) == expected

        def post(headers: dict[str, str], path: str = COMPLETIONS, **body: Any) -> httpx.Response:
            return http.post(path, json={**BODY, **body}, headers=headers)

        with running.http() as http:
            check("bad_request", 400, send_raw(running, b"what is this?\r\n\r\n"))
            check("bad_request", 400, send_raw(running, head + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n"))
            check("bad_request", 400, send_raw(running, b"GET http://a HTTP/1.1\r\n\r\n", behind=b"/health"))
            check("bad_request", 400, send_raw(running, b"\0", behind=b"/health"))
            check("request_header_fields_too_large", 431, send_raw(running, b"GET /" + b"a" * 70_000))
            check("misdirected_request", 421, http.get("/version", headers={"Host": "evil"}))
            check("forbidden", 403, http.get("/version", headers={**key, "Origin": "http://evil"}))
            check("invalid_api_key", 401, post(bearer("wrong")))
            assert post(few).status_code == 200
            check("rate_limit_exceeded", 429, post(few))
            check("request_too_large", 413, post(key, prompt="a" * (1 << 20)))
            check("request_too_slow", 408, send_raw(running, head + b"Content-Length: 10\r\n\r\n"))
            check("not_found", 404, http.get("/nothing", headers=key))
            check("method_not_allowed", 405, http.get(COMPLETIONS, headers=key))
            check("not_allowed", 403, http.get("/metrics", headers=key))
            check("bad_request", 400, post(key, max_tokens=-2))
            check("bad_request", 400, post(small, n=2))
            check("bad_request", 422, http.post("/generate", json={"inputs": 1}, headers=key))
            check("model_not_found", 404, post(key, model="nobody"))
            check("context_length_exceeded", 400, post(key, prompt="word " * 20_000))
            check("request_timeout", 504, post({**key, "X-Request-Timeout": "1e-9"}))
            running.server._service.is_closing = True
            check("server_closing", 503, post(key))
            assert http.get("/ready").status_code == 503  # a 503 of /ready is an answer, not a refusal
            assert refusals(running) == expected
        lines = [line for line in audited(caplog) if "error" in line]
    assert Counter(line["error"] for line in lines) == expected
    assert all(line["status"] >= 400 and line["status"] != CLIENT_DISCONNECTED for line in lines)


def test_client_counter_and_audit_log_report_same_first_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Client, counter and audit log report the first cause.

    The key is removed, then added again before the request has ended, and then the server shuts down.
    """
    caplog.set_level(logging.INFO, logger="octavo.audit")
    path = tmp_path / "keys.toml"
    key = add_key(path, Tenant(name="gone"))
    with_key = path.read_text()
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor, api_keys_file=path) as running, running.http() as http:
        body = {**BODY, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=body, headers=bearer(key)) as stream:
            lines = stream.iter_lines()
            next(lines)
            executor.gate.clear()  # no step ends in the meantime
            path.unlink()
            add_key(path, Tenant(name="other"))
            reload(running)
            path.write_text(with_key)
            reload(running)
            service, loop = running.server._service, running.server.servers[0].get_loop()
            asyncio.run_coroutine_threadsafe(service.drain(0.0), loop)  # the second cause
            wait_until(lambda: service._is_ending, "the server ends what is open")
            executor.gate.set()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "invalid_api_key"
        wait_until(lambda: refusals(running), "it is counted")
        assert refusals(running) == {"invalid_api_key": 1}
    (line,) = audited(caplog)
    assert (line["status"], line["error"]) == (200, "invalid_api_key")


def test_server_fault_is_in_server_log_but_not_in_audit_log(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a fault")

    with run_server() as running, running.http() as http:
        monkeypatch.setattr(Service, "check_model", fail)
        assert http.post(COMPLETIONS, json=BODY).status_code == 500
    (record,) = [each for each in caplog.records if each.exc_info and "request failed" in each.message]
    assert record.name != logs.AUDIT
