"""Figures of published KV events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVEventFigures:
    """Totals since the start of the engine process. A dropped batch is not published."""

    num_events: int = 0
    num_batches: int = 0
    num_dropped_batches: int = 0
