"""Watch an engine process's health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.engine import ipc

if TYPE_CHECKING:
    from collections.abc import Sequence

_AWAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits for an engine process, in seconds.

    - frozen: Time without a message until the process counts as not ready.
    - dead: Time without a message until the process is killed.
    - stuck, endless: Like `frozen` and `dead`, but for the time without progress.
    - loading: Replaces `dead` until the process is ready.
    - restarts: Pauses before consecutive restarts. The last pause repeats.
    - healthy: After this time of service, pauses begin again with the first.
    """

    frozen: float = 3.0
    dead: float = 8.0
    loading: float = 120.0
    stuck: float = 60.0
    endless: float = 300.0
    restarts: Sequence[float] = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
    healthy: float = 60.0


class Health:
    """Judges a process's health by its messages. Only `is_well` is thread-safe."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._is_loading = True
        self._progress = 0
        self._looked_at = self._reported_at = self._moved_at = now

    def look(self, now: float) -> None:
        """Record the time. Call this before messages are read.

        If the calling thread was delayed since the last call, the delay does not count as silence.
        """
        away = now - self._looked_at
        if away > _AWAY_S:
            self._reported_at += away
            self._moved_at += away
        self._looked_at = now

    def note_report(self, message: ipc.ToParent) -> None:
        """Record a message."""
        self._reported_at = self._looked_at
        match message:
            case ipc.Alive() if message.progress != self._progress:
                self._progress, self._moved_at = message.progress, self._looked_at
            case ipc.Loading():
                self._moved_at = self._looked_at
            case ipc.Ready():
                self._is_loading, self._moved_at = False, self._looked_at

    @property
    def is_well(self) -> bool:
        """True if the last message and the last progress are recent."""
        silent_s, still_s = self._looked_at - self._reported_at, self._looked_at - self._moved_at
        return silent_s < self._patience.frozen and still_s < self._patience.stuck

    @property
    def why_given_up(self) -> str | None:
        """Why the process must be killed, or None."""
        limit = self._patience.loading if self._is_loading else self._patience.dead
        if self._looked_at - self._reported_at > limit:
            return f"sent no message for {limit:g} s"
        if self._looked_at - self._moved_at > self._patience.endless:
            return f"made no progress for {self._patience.endless:g} s"
        return None
