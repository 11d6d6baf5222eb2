"""The engines' metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from octavo.http.metrics import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from octavo.router.engines import EnginePool

# (attribute of EngineHandle, name, description)
_GAUGES = (
    ("is_ready", "router_engine_ready", "1 while an engine accepts requests."),
    (
        "open_tokens",
        "router_open_tokens",
        "Estimated tokens of open requests at an engine: prompts and outputs that are not done.",
    ),
    ("other_tokens", "router_other_tokens", "Estimated tokens of requests that other clients sent to an engine."),
)
_COUNTERS = (
    ("num_requests", "router_requests", "Requests that were sent to an engine."),
    ("num_prompt_tokens", "router_prompt_tokens", "Prompt tokens of requests whose answers contained usage."),
    ("num_cached_tokens", "router_cached_tokens", "Prompt tokens that were cached, of router_prompt_tokens."),
    ("num_failures", "router_failures", "Requests that an engine failed to answer."),
    ("num_paired", "router_paired_requests", "Requests sent to an engine while a prefill engine computes their KV."),
    ("num_paired_in_vain", "router_paired_in_vain", "Requests for which no KV arrived, of router_paired_requests."),
    ("num_prefills", "router_prefills", "Prompts that a prefill engine was asked to compute."),
    ("num_failed_prefills", "router_failed_prefills", "Prompts that were refused, lost or late, of router_prefills."),
    ("num_prefill_tokens", "router_prefill_tokens", "Prompt tokens of router_prefills, cached ones included."),
    ("num_restarts", "router_engine_restarts", "Detected restarts of an engine."),
)


class RouterCollector(Collector):
    """Reads the metrics."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        engines = list(self._pool.engines.values())
        for family, figures in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for attribute, name, text in figures:
                values = [([engine.url], float(getattr(engine, attribute))) for engine in engines]
                yield family(name, text, ["engine"], values)
        num_open = [([engine.url], len(engine.routed_requests)) for engine in engines]
        yield gauge("router_open_requests", "Open requests of an engine.", ["engine"], num_open)
