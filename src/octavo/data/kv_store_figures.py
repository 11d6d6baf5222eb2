"""A KV store's figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStoreFigures:
    """Figures of one store, counted by its client in this engine.

    num_blocks, num_bytes: as of the last call. num_corrupt: blocks that differed from their saved content. is_usable: 1
    if the store is open, its last call succeeded, and no call hangs; else 0.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    is_usable: int = 0
