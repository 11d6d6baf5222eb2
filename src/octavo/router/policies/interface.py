"""The interface of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class Policy(Protocol):
    """Chooses engines, and is notified of requests that are sent and that end. Used in one thread only."""

    def choose(self, asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return one of `engines`, which are two or more."""
        ...

    def sent(self, asked: Asked, engine: Engine) -> float:
        """Note that a request goes to an engine; return the share of its prompt expected in the engine's cache."""
        ...

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Note that a request is over. cached_share: the share of its prompt that hit the cache; None: not reported."""
        ...

    def forget(self, engine: Engine) -> None:
        """Note that an engine's cache is empty, or that the engine is gone."""
        ...


class Memoryless:
    """Base of policies that remember nothing."""

    def sent(self, _asked: Asked, _engine: Engine) -> float:
        """Expect nothing in the cache."""
        return 0.0

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Do nothing."""

    def forget(self, engine: Engine) -> None:
        """Do nothing."""
