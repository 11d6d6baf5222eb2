"""The interface of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class Policy(Protocol):
    """Chooses engines. Used in one thread only."""

    def choose(self, asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return one of two or more engines."""
        ...

    def sent(self, asked: Asked, engine: Engine) -> float:
        """Note a sent request; return the share of its prompt expected in the cache."""
        ...

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Note a request's end. cached_share: of its prompt; None: not reported."""
        ...

    def forget(self, engine: Engine) -> None:
        """Forget an engine's cache."""
        ...


class Memoryless:
    """Policies without memory."""

    def sent(self, _asked: Asked, _engine: Engine) -> float:
        """Expect nothing."""
        return 0.0

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Do nothing."""

    def forget(self, engine: Engine) -> None:
        """Do nothing."""
