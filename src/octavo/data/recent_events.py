"""A bounded event buffer."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from octavo.data.events import StepCompleted, StepScheduled

if TYPE_CHECKING:
    from octavo.data.events import Event


class RecentEvents:
    """Keeps the newest events, up to a total weight, for clients that begin to watch.

    Events are numbered from 0.
    """

    def __init__(self, max_weight: int = 200_000) -> None:
        self.num_seen = self.weight = 0  # `num_seen` is the next event's number
        self._max_weight = max_weight
        self._events: deque[Event] = deque()

    def emit(self, event: Event) -> None:
        """Keep an event. Drop the oldest above the limit."""
        self._events.append(event)
        self.num_seen += 1
        self.weight += weight_of(event)
        while self.weight > self._max_weight and len(self._events) > 1:
            self.weight -= weight_of(self._events.popleft())

    @property
    def first_kept(self) -> int:
        """The number of the oldest kept event."""
        return self.num_seen - len(self._events)

    def since(self, number: int) -> list[Event]:
        """Return the kept events from this number on."""
        return list(islice(self._events, max(number - self.first_kept, 0), None))


def weight_of(event: Event) -> int:
    """Return an event's weight, which is 1, plus 1 for each request of a step."""
    if isinstance(event, StepScheduled):
        return 1 + len(event.num_scheduled_tokens)
    return 1 + len(event.num_new_tokens) if isinstance(event, StepCompleted) else 1
