"""The policy "least_loaded"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class LeastLoaded(Policy):
    """Chooses the engine with the fewest open, then the fewest sent tokens."""

    def choose(self, _asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Choose an engine."""
        return least_loaded(engines)


def least_loaded(engines: Sequence[Engine]) -> Engine:
    """Return the engine with the smallest load."""
    return min(engines, key=lambda engine: (engine.load, engine.num_sent_tokens, engine.number))
