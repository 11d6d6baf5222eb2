"""The policy "round_robin"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class RoundRobin(RoutingPolicy):
    """Chooses engines in turn. A removal does not change the order."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, _summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine."""
        chosen = min(engines, key=lambda engine: (engine.number <= self._last, engine.number))
        self._last = chosen.number
        return chosen
