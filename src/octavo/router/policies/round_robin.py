"""One engine after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import Memoryless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


class RoundRobin(Memoryless):
    """In the order in which engines came; who leaves changes no other's turn."""

    def __init__(self) -> None:
        self._last = -1  # its number

    def choose(self, _asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return the next one."""
        chosen = min(engines, key=lambda engine: (engine.number <= self._last, engine.number))
        self._last = chosen.number
        return chosen
