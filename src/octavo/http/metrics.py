"""Metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric
    from prometheus_client.registry import Collector


class Metrics:
    """A server's metrics."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._requests = Counter(
            "http_requests", "Answered HTTP requests.", ["method", "handler", "status"], registry=self._registry
        )
        self._refused = Counter(
            "octavo:requests_refused",
            "Requests that were refused or cut off, by error code.",
            ["code"],
            registry=self._registry,
        )

    def count_answer(self, method: str, handler: str, status: int) -> None:
        """Count a request. handler: The route's path, because the request's path would let clients create labels."""
        self._requests.labels(method, handler, str(status)).inc()

    def count_refusal(self, reason: str) -> None:
        """Count a refusal."""
        self._refused.labels(reason).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format of the Accept header, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Make a gauge."""
    return _filled(GaugeMetricFamily(f"octavo:{name}", text, labels=labels), values)


def counter(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Make a counter."""
    return _filled(CounterMetricFamily(f"octavo:{name}", text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for label_values, number in values:
        family.add_metric(label_values, number)
    return family
