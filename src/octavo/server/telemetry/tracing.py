"""Reports requests as OpenTelemetry spans. Attributes that vLLM also has use vLLM's names.

Each admitted request becomes a span `llm_request`, even if the request fails later. The span's parent is the client's
`traceparent`, and its children are the phases `queue`, `prefill` and `decode`. Spans contain no prompt or answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Scope

    from octavo.outputs import RequestMetrics
    from octavo.server.answers.usage import UsageCounter

_FLUSH_S = 2.0
_CONTEXT = frozenset({b"traceparent", b"tracestate"})


class Tracing:
    """Sends spans to a collector in a background thread. If the collector is unreachable, spans are lost.

    endpoint: URL for OTLP over HTTP, such as http://localhost:4318/v1/traces.
    """

    def __init__(self, endpoint: str) -> None:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_FLUSH_S)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")

    def record_span(
        self, scope: Scope, request_id: str, status: int, seconds: float, reason: str | None, details: dict[str, Any]
    ) -> None:
        """Make the spans of an ended request.

        reason: Why the request was refused or aborted, or None.
        details: Fields for the audit log. If "usage" is missing, the request was not admitted and gets no span.
        """
        usage: UsageCounter | None = details.get("usage")
        if usage is None:
            return
        end = time.time_ns()
        shift = end - time.monotonic_ns()  # wall-clock time minus the engine's clock
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT
        }
        span = self._tracer.start_span(
            "llm_request",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(scope, request_id, status, details, usage),
            start_time=end - round(1e9 * seconds),
        )
        below = trace.set_span_in_context(span)
        for name, start_s, end_s in _phases(usage.metrics):
            child = self._tracer.start_span(name, context=below, start_time=round(1e9 * start_s) + shift)
            child.end(round(1e9 * end_s) + shift)
        if reason is not None:
            span.set_attribute("error.type", reason)
            if status < 400 or status >= 500:  # by convention, 4xx is the client's error
                span.set_status(trace.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans, for at most `_FLUSH_S` seconds."""
        self._provider.force_flush(round(1000 * _FLUSH_S))
        self._provider.shutdown()


def _attributes(
    scope: Scope, request_id: str, status: int, details: dict[str, Any], usage: UsageCounter
) -> dict[str, Any]:
    counts = usage.summary()
    attributes = {
        "http.route": getattr(scope.get("route"), "path", ""),
        "http.response.status_code": status,
        "http.request.header.x-request-id": request_id,
        "gen_ai.request.id": details.get("id", ""),
        "gen_ai.response.model": details.get("model", ""),
    }
    if counts:
        attributes |= {
            "gen_ai.usage.prompt_tokens": counts["prompt_tokens"],
            "gen_ai.usage.cached_tokens": counts["cached_tokens"],
            "gen_ai.usage.completion_tokens": counts["completion_tokens"],
            "gen_ai.response.finish_reasons": counts["finish_reasons"],
        }
    metrics = usage.metrics
    first = [each.first_token_time for each in metrics if each.first_token_time is not None]
    if first:
        arrival = min(each.arrival_time for each in metrics)
        attributes["gen_ai.latency.time_to_first_token"] = min(first) - arrival
    tenant = scope.get("state", {}).get("tenant")
    if tenant is not None and tenant.name:
        attributes["octavo.key"] = tenant.name
    return attributes


def _phases(metrics: list[RequestMetrics]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, end) of each phase, in seconds of the engine's clock."""
    if not metrics:
        return
    arrival = min(each.arrival_time for each in metrics)
    scheduled = min((t for each in metrics if (t := each.first_scheduled_time) is not None), default=None)
    first = min((t for each in metrics if (t := each.first_token_time) is not None), default=None)
    last = max((t for each in metrics if (t := each.finished_time) is not None), default=None)
    if scheduled is not None:
        yield "queue", arrival, scheduled
        if first is not None:
            yield "prefill", scheduled, first
            if last is not None:
                yield "decode", first, last
