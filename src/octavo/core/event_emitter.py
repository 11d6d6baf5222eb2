"""Events of the core, stamped with the step and the time of the call that causes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.events import Event, EventSink


def emit_nothing(_kind: Callable[..., Event], *_args: object) -> None:
    """Do nothing. Replaces `EventEmitter.emit` if no events are wanted."""


class EventEmitter:
    """Makes events and passes them to a sink. The scheduler sets `step` and `now` when it is called."""

    def __init__(self, sink: EventSink) -> None:
        self.step = 0
        self.now = 0.0
        self._sink = sink

    def emit(self, kind: Callable[..., Event], *args: object) -> None:
        """Emit an event of a kind. args: its fields after step and time."""
        self._sink.emit(kind(self.step, self.now, *args))
