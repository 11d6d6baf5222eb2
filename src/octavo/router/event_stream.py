"""Splits event streams."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.router.answer import MalformedAnswerError
from octavo.router.usage import COUNTS_BYTES

if TYPE_CHECKING:
    from octavo.router.routed_request import Share

_KEPT_PIECES, _KEPT_BYTES = 4, 1 << 20  # the last event may contain no token counts
_BLANK_LINES = (b"\n\n", b"\n\r\n")
_LONGEST_END = 3


class EventStream:
    """Splits an engine's stream into complete events in linear time. `share` counts the events.

    is_of_lines: True if each line is an event. Otherwise a blank line ends an event.
    max_bytes: Limit of an event.
    """

    def __init__(self, share: Share, *, is_of_lines: bool, max_bytes: int) -> None:
        self._share, self._max_bytes = share, max_bytes
        self._ends = (b"\n",) if is_of_lines else _BLANK_LINES
        self._last: deque[bytes] = deque()
        self._num_last_bytes = 0
        self._rest = bytearray()
        self.first = b""

    def whole(self, piece: bytes) -> bytes:
        """Add bytes and return completed events. Raises `MalformedAnswerError`.

        Spaces between events are returned immediately.
        """
        if not (self._rest or piece.strip(b" ")):
            return piece
        if self._rest or not piece.endswith(self._ends):
            piece = self._completed(piece)
        if piece:
            self._share.note_returned(sum(map(piece.count, self._ends)))
            self._keep(piece)
        return piece

    def _completed(self, piece: bytes) -> bytes:
        start = max(len(self._rest) - _LONGEST_END + 1, 0)  # the event's end may begin in `_rest`
        self._rest += piece
        place = max(_end_of_last(end, self._rest, start) for end in self._ends)
        if not place:
            if len(self._rest) > self._max_bytes:
                raise MalformedAnswerError(f"an event of its stream exceeds the limit of {self._max_bytes} bytes")
            return b""
        with memoryview(self._rest) as rest:
            whole, left = bytes(rest[:place]), rest[place:].tobytes()
        self._rest = bytearray(left)
        return whole

    def _keep(self, piece: bytes) -> None:
        self.first = self.first or piece[:COUNTS_BYTES]
        self._last.append(piece)
        self._num_last_bytes += len(piece)
        while len(self._last) > 1 and (len(self._last) > _KEPT_PIECES or self._num_last_bytes > _KEPT_BYTES):
            self._num_last_bytes -= len(self._last.popleft())

    @property
    def rest(self) -> bytes:
        """The incomplete event."""
        return bytes(self._rest)

    @property
    def last(self) -> bytes:
        """The last events."""
        return b"".join(self._last)

    @property
    def last_event(self) -> bytes:
        """Last complete event."""
        text = self.last.rstrip(b"\r\n")
        return text[max(_end_of_last(end, text) for end in self._ends) :]


def _end_of_last(wanted: bytes, text: bytes | bytearray, start: int = 0) -> int:
    place = text.rfind(wanted, start)
    return 0 if place < 0 else place + len(wanted)
