"""Spans as a real collector receives them: OTLP over HTTP, decoded with the protocol's own messages."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeExecutor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from running import run_server

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Receives spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(each.resource)
                    for scope in each.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with contextlib.closing(Collector()) as collector:
        yield collector


def values(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.turn(12)
def test_each_request_has_span_with_queue_prefill_and_decode(collector: Collector) -> None:
    before = time.time_ns()
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor, otlp_traces_endpoint=collector.url) as running, running.http() as http:
        whole = http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"}).json()
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True})
        http.post("/v1/completions", json={**BODY, "prompt": ["a", "b"], "n": 2})
        http.get("/v1/models")
        http.post("/v1/completions", json={"prompt": 3})
    after = time.time_ns()  # the server sends the remaining spans when it ends
    roots = collector.named("llm_request")
    assert [values(span)["http.route"] for span in roots] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions",
    ]
    told = values(roots[0])
    assert told["gen_ai.request.id"] == whole["id"]
    assert told["http.request.header.x-request-id"] == "mine"
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.response.model"] == "fake"
    assert told["gen_ai.usage.prompt_tokens"] == whole["usage"]["prompt_tokens"] == 5
    assert told["gen_ai.usage.completion_tokens"] == 4
    assert [each.string_value for each in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert values(roots[2])["gen_ai.usage.completion_tokens"] == 16
    assert {each.key: each.value.string_value for each in collector.resources[0].attributes}["service.name"] == "octavo"
    for root in roots:
        assert before <= root.start_time_unix_nano <= root.end_time_unix_nano <= after
        children = {span.name: span for span in collector.spans if span.parent_span_id == root.span_id}
        assert children.keys() == {"queue", "prefill", "decode"}
        parts = [children[name] for name in ("queue", "prefill", "decode")]
        for one, other in itertools.pairwise(parts):
            assert one.end_time_unix_nano == other.start_time_unix_nano
        assert all(part.start_time_unix_nano <= part.end_time_unix_nano for part in parts)
        assert parts[2].end_time_unix_nano - parts[2].start_time_unix_nano > 1e7, "three more steps"
        ttft = values(root)["gen_ai.latency.time_to_first_token"]
        assert ttft == pytest.approx(1e-9 * (parts[2].start_time_unix_nano - parts[0].start_time_unix_nano), abs=1e-5)


def test_traceparent_header_sets_parent_span(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with run_server(otlp_traces_endpoint=collector.url) as running, running.http() as http:
        http.post("/v1/completions", json=BODY, headers=headers)
        http.post("/v1/completions", json=BODY, headers={"traceparent": "not a trace at all"})
    child, alone = collector.named("llm_request")
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, PARENT)
    assert alone.trace_id.hex() != TRACE
    assert alone.parent_span_id == b""


def test_failed_stream_marks_span_as_error(collector: Collector) -> None:
    executor = FakeExecutor()
    with run_server(executor, otlp_traces_endpoint=collector.url) as running, running.http() as http:
        executor.fail_next = True
        assert http.post("/v1/completions", json={**BODY, "stream": True}).status_code == 500
        with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 4000, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            executor.fail_next = True
            assert any('"error"' in line for line in lines)
        http.post("/v1/completions", json=BODY)
    unbegun, failed, whole = collector.named("llm_request")
    assert (values(unbegun)["http.response.status_code"], unbegun.status.code) == (500, 2)
    assert values(unbegun)["gen_ai.request.id"].startswith("cmpl-")
    assert values(failed)["http.response.status_code"] == values(whole)["http.response.status_code"] == 200
    assert (failed.status.code, values(failed)["error.type"]) == (2, "internal_server_error")
    assert (whole.status.code, "error.type" in values(whole)) == (0, False)


@pytest.mark.turn(8)
def test_unreachable_collector_does_not_affect_requests() -> None:
    with run_server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as running, running.http() as http:
        for _ in range(3):
            assert http.post("/v1/completions", json=BODY).status_code == 200
        start = time.monotonic()
    assert time.monotonic() - start < 15


def test_missing_opentelemetry_error_names_octavo_otel_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "octavo.server.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with run_server() as running, pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        Service(running.server._service.engine, ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9"))
