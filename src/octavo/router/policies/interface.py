"""What a router asks of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class Policy(Protocol):
    """Chooses an engine; hears of what was sent and of what became of it. All of it in one thread."""

    def choose(self, asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return one of these engines, of which there are two or more."""
        ...

    def sent(self, asked: Asked, engine: Engine) -> float:
        """Hear that a request goes to an engine; return the share of its prompt that should be in its cache."""
        ...

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Hear that a request is over. cached_share: of its prompt, found in the engine's cache; None: not told."""
        ...

    def forget(self, engine: Engine) -> None:
        """Hear that an engine's cache is empty, or that it is gone."""
        ...


class Memoryless:
    """What policies hear who remember nothing."""

    def sent(self, _asked: Asked, _engine: Engine) -> float:
        """Know of nothing in its cache."""
        return 0.0

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Do nothing."""

    def forget(self, engine: Engine) -> None:
        """Do nothing."""
