"""A stream of events on its way to a client: whole ones alone are passed on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.router.flight import Share

_KEPT_PIECES = 4  # of the last ones: the counts may stand in an event before the last


class EventStream:
    """Cuts what comes behind events, and counts these. first: the first ones; rest: of one that is not whole yet.

    end: what each ends with.
    """

    def __init__(self, share: Share, end: bytes) -> None:
        self._share, self._end = share, end
        self._last: deque[bytes] = deque(maxlen=_KEPT_PIECES)
        self.first = self.rest = b""

    def whole(self, piece: bytes) -> bytes:
        """Take what has come; return the events that are whole with it, and blanks between two: signs of life."""
        if not (self.rest or piece.strip(b" ")):
            return piece
        if self.rest or not piece.endswith(self._end):
            events, end, self.rest = (self.rest + piece).rpartition(self._end)
            piece = events + end
        if piece:
            self._share.came_back(piece.count(self._end))
            self._last.append(piece)
            self.first = self.first or piece
        return piece

    @property
    def last(self) -> bytes:
        """The last events."""
        return b"".join(self._last)

    @property
    def last_event(self) -> bytes:
        """The last one, without its end."""
        return self.last.removesuffix(self._end).rpartition(self._end)[2]
