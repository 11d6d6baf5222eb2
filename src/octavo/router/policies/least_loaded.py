"""The policy "least_loaded"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class LeastLoaded(RoutingPolicy):
    """Chooses the least loaded engine."""

    def choose(self, _summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine."""
        return least_loaded(engines)


def least_loaded(engines: Sequence[EngineHandle]) -> EngineHandle:
    """Return the least loaded engine."""
    return min(engines, key=lambda engine: (engine.load, engine.num_sent_tokens, engine.number))
