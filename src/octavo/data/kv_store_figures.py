"""What a store of KV holds, and how it fares: counted where it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStoreFigures:
    """Figures of one store. num_blocks, num_bytes: what it holds, as of its last call.

    num_corrupt, num_errors: blocks whose content had changed since they were saved, and failed calls, since the start.
    is_usable: 1 if the store is open and its last call succeeded; 0 before it is open, after a failed call, and while a
    call hangs.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    is_usable: int = 0
