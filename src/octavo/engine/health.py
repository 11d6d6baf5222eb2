"""How an engine process is, told from what is heard of it. No process, no socket and no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.engine import ipc

if TYPE_CHECKING:
    from collections.abc import Sequence

_AWAY_S = 1.0  # a watcher who looks several times a second did not run meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What an engine process is allowed, in seconds.

    Silence: its pulse beats every half second, also during a step. frozen: then it is not ready. dead: then it is
    killed; loading: so long before it is ready.
    Progress, of the kind that `octavo.engine.ipc.Alive` counts. stuck: so long without any, and it is not ready.
    endless: then it is killed, also before it is ready, where weights that are packed are progress.
    restarts: waits before it is started again, the last one for all further times; `healthy` seconds in which it took
    requests forget them.
    """

    frozen: float = 3.0
    dead: float = 8.0
    loading: float = 120.0
    stuck: float = 60.0
    endless: float = 300.0
    restarts: Sequence[float] = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
    healthy: float = 60.0


class Health:
    """What a watcher knows of one engine process, as of its last look; it alone writes, others may read `is_well`."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._is_loading = True
        self._progress = 0
        self._looked_at = self._heard_at = self._moved_at = now

    def look(self, now: float) -> None:
        """Note that the thread that drives the engine looks, as it does several times a second.

        If it did not, it was stopped itself, perhaps with the whole machine, and its silence says nothing.
        """
        away = now - self._looked_at
        if away > _AWAY_S:
            self._heard_at += away
            self._moved_at += away
        self._looked_at = now

    def hear(self, message: ipc.ToParent) -> None:
        """Take a message in, as heard at the last look."""
        self._heard_at = self._looked_at
        match message:
            case ipc.Alive():
                if message.progress != self._progress:
                    self._progress, self._moved_at = message.progress, self._looked_at
            case ipc.Loading():
                self._moved_at = self._looked_at
            case ipc.Ready():
                self._is_loading, self._moved_at = False, self._looked_at

    @property
    def is_well(self) -> bool:
        """Whether it was heard of lately, and gets further."""
        silent_s, still_s = self._looked_at - self._heard_at, self._looked_at - self._moved_at
        return silent_s < self._patience.frozen and still_s < self._patience.stuck

    @property
    def why_given_up(self) -> str | None:
        """Why it has to be killed, if it has."""
        limit = self._patience.loading if self._is_loading else self._patience.dead
        if self._looked_at - self._heard_at > limit:
            return f"was not heard of for {limit:g} s"
        if self._looked_at - self._moved_at > self._patience.endless:
            return f"got no further for {self._patience.endless:g} s"
        return None
