"""Figures of an external KV store, counted by its client in this engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStoreFigures:
    """Figures of one store.

    num_blocks, num_bytes: its content as of the last call. num_corrupt: blocks that differed from their saved content,
    since the start. num_errors: failed calls since the start.
    is_usable: 1 if the store is open and its last call succeeded; 0 before it is open, after a failed call, and while a
    call hangs.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    is_usable: int = 0
