"""The figures of engines in GET /metrics of a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from octavo.http.metrics import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from octavo.router.engines import EnginePool

# (attribute of Engine, name, description)
_GAUGES = (
    ("is_ready", "router_engine_ready", "1 while an engine takes requests."),
    ("open_tokens", "router_open_tokens", "Tokens that were sent to an engine, or are to come of it, reckoned."),
    ("other_tokens", "router_other_tokens", "Tokens that others have sent it, reckoned from its own figures."),
)
_COUNTERS = (
    ("num_requests", "router_requests", "Requests that were sent to an engine."),
    ("num_prompt_tokens", "router_prompt_tokens", "Tokens of prompts, of requests whose answers told of them."),
    ("num_cached_tokens", "router_cached_tokens", "Of these, tokens that the engine found in its cache."),
    ("num_failures", "router_failures", "Requests that an engine has lost."),
    ("num_paired", "router_paired_requests", "Requests that an engine answers with KV of another one's prefill."),
    ("num_paired_in_vain", "router_paired_in_vain", "Of these, requests to which no KV came."),
    ("num_prefills", "router_prefills", "Prompts that an engine was to compute for another one."),
    ("num_failed_prefills", "router_failed_prefills", "Of these, prompts that it refused, lost or was too slow with."),
    ("num_prefill_tokens", "router_prefill_tokens", "Tokens of prompts that it has computed so, or had in its cache."),
    ("num_restarts", "router_engine_restarts", "How often an engine was seen to have begun anew."),
)


class RouterCollector(Collector):
    """Reads the engines' figures at each request for the metrics."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each figure, with the engine's address."""
        engines = list(self._pool.engines.values())
        for family, figures in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for attribute, name, text in figures:
                values = [([engine.url], float(getattr(engine, attribute))) for engine in engines]
                yield family(name, text, ["engine"], values)
        num_open = [([engine.url], len(engine.flights)) for engine in engines]
        yield gauge("router_open_requests", "Requests that an engine is doing.", ["engine"], num_open)
