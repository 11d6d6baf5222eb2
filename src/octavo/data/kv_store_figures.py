"""What a store of KV did for an engine, counted where it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStoreFigures:
    """Figures of one store. num_blocks, num_bytes: what it holds, as of its last call; all others are totals.

    load_seconds, save_seconds: of its calls, which may go on at once; bandwidths follow from these. num_corrupt: blocks
    that were not what was saved. num_errors: calls that failed. is_usable: 0 while it is left alone.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    num_saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    is_usable: int = 1
