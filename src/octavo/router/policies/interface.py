"""Interface of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


class RoutingPolicy(ABC):
    """Chooses engines. Used in one thread only."""

    @abstractmethod
    def choose(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Return one of two or more engines."""

    def sent(self, summary: RequestSummary, engine: EngineHandle) -> float:  # noqa: ARG002 - optional
        """Record a sent request. Returns the share of the prompt expected in the engine's cache."""
        return 0.0

    def ended(self, summary: RequestSummary, engine: EngineHandle, cached_share: float | None) -> None:  # noqa: B027 - optional
        """Record a request's end."""

    def forget(self, engine: EngineHandle) -> None:  # noqa: B027 - optional
        """Forget an engine's cache."""

    def recall(self, engine: EngineHandle, lost_until: int) -> None:  # noqa: B027 - optional
        """Use what a state file said about an engine's cache.

        lost_until: Content last sent at this time or earlier was evicted.
        """
