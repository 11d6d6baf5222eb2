"""KV beyond the device: stores of blocks by key, and what the scheduler asks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kv_transfer.tiers import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.config import KVTransferConfig
    from octavo.kv_transfer.interface import KVStore

    StoreFactory = Callable[[int], KVStore]


def create_store(config: KVTransferConfig, block_bytes: int, first: StoreFactory | None = None) -> TieredStore | None:
    """Return the stores that were asked for, the fastest first; None where there are none.

    first(block_bytes) makes one that is asked before those of the configuration. A store that is down is no error: it
    is opened when it is asked, and again later.
    """
    del config  # names no store yet
    stores = [] if first is None else [first(block_bytes)]
    return TieredStore(stores) if stores else None
