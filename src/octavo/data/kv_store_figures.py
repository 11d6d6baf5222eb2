"""KV store figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStoreFigures:
    """Figures of one store, counted by its client in this engine.

    is_usable: 1 if the store is open, the last call succeeded, and no call hangs. Otherwise 0.
    """

    num_blocks: int = 0  # as of the last load or save
    num_bytes: int = 0  # as of the last load or save
    num_corrupt: int = 0  # blocks that differed from their saved content
    num_errors: int = 0
    is_usable: int = 0
