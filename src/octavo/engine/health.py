"""The health of an engine process, derived from its messages. Has no process, socket or clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.engine import ipc

if TYPE_CHECKING:
    from collections.abc import Sequence

_AWAY_S = 1.0  # a longer gap between two looks means that the watching thread itself was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits for an engine process, in seconds.

    Without a message (the pulse is sent every half second, also during a step):
    frozen: the process counts as not ready. dead: it is killed. loading: replaces `dead` until it is ready.
    Without progress (see `octavo.engine.ipc.Alive`):
    stuck: the process counts as not ready. endless: it is killed. Before it is ready, packed weights count as progress.
    restarts: pauses before consecutive restarts; the last one is used for all further ones. healthy: after the process
    has taken requests for this time, the next restart begins with the first pause again.
    """

    frozen: float = 3.0
    dead: float = 8.0
    loading: float = 120.0
    stuck: float = 60.0
    endless: float = 300.0
    restarts: Sequence[float] = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
    healthy: float = 60.0


class Health:
    """The health of one engine process as of the watcher's last look.

    Only the watcher's thread writes. Any thread may read `is_well`.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._is_loading = True
        self._progress = 0
        self._looked_at = self._heard_at = self._moved_at = now

    def look(self, now: float) -> None:
        """Record the time of a look. The thread that drives the engine looks several times a second.

        After a longer gap this thread was itself stopped, perhaps with the whole machine. The gap then does not count
        as silence of the process.
        """
        away = now - self._looked_at
        if away > _AWAY_S:
            self._heard_at += away
            self._moved_at += away
        self._looked_at = now

    def hear(self, message: ipc.ToParent) -> None:
        """Record a message as received at the last look."""
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
        """Whether the process sent a message and made progress within the limits `frozen` and `stuck`."""
        silent_s, still_s = self._looked_at - self._heard_at, self._looked_at - self._moved_at
        return silent_s < self._patience.frozen and still_s < self._patience.stuck

    @property
    def why_given_up(self) -> str | None:
        """Why the process has to be killed; None if it has not."""
        limit = self._patience.loading if self._is_loading else self._patience.dead
        if self._looked_at - self._heard_at > limit:
            return f"was not heard of for {limit:g} s"
        if self._looked_at - self._moved_at > self._patience.endless:
            return f"got no further for {self._patience.endless:g} s"
        return None
