"""Report a core's events as snapshots."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.data.recent_events import weight_of
from octavo.data.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.data.events import Event
    from octavo.engine.engine_core import EngineCore

SNAPSHOT_INTERVAL_S = 0.25
_MAX_WEIGHT = 5_000  # of a snapshot


class SnapshotFeed:
    """Reports events to one client: first kept events, then new ones. Call methods only between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_sent = 0
        self._is_first = True
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """True if `look` should be called again."""
        return time.monotonic() >= self._next

    def look(self) -> Iterator[Snapshot]:
        """Yield snapshots of the events since the last call."""
        self._next = time.monotonic() + SNAPSHOT_INTERVAL_S
        recent = self._core.recent
        if recent.num_seen == self._num_sent and not self._is_first:
            return
        if recent.first_kept > self._num_sent:  # the core has dropped events that were not sent
            self._is_first = True
        *parts, last = _parts(recent.since(self._num_sent))
        self._num_sent = recent.num_seen
        for events in parts:
            yield Snapshot(events, is_first=self._is_first)
            self._is_first = False
        yield Snapshot(last, is_first=self._is_first, blocks=self._core.scheduler.block_map())
        self._is_first = False


def _parts(events: list[Event]) -> Iterator[list[Event]]:
    part: list[Event] = []
    weight = 0
    for event in events:
        part.append(event)
        weight += weight_of(event)
        if weight >= _MAX_WEIGHT:
            yield part
            part, weight = [], 0
    yield part
