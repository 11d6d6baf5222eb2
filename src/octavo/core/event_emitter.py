"""Emits core events."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.events import Event, EventSink


def emit_nothing(_kind: Callable[..., Event], *_args: object) -> None:
    """Discard an event."""


class EventEmitter:
    """Passes events to a sink. The core sets `step` and `now`."""

    def __init__(self, sink: EventSink) -> None:
        self.step = 0
        self.now = 0.0
        self._sink = sink

    def emit(self, kind: Callable[..., Event], *args: object) -> None:
        """Emit an event of class `kind`. args: The event's fields after step and time."""
        self._sink.emit(kind(self.step, self.now, *args))
