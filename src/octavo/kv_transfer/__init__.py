"""External KV stores."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.kv_transfer.direct import host_bytes as direct_host_bytes
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.mooncake import MooncakeStore
from octavo.kv_transfer.tiers import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.config import KVTransferConfig
    from octavo.kv_transfer.direct_donor import DirectDonor
    from octavo.kv_transfer.direct_receiver import DirectReceiver
    from octavo.kv_transfer.interface import KVStore

    StoreFactory = Callable[[int], KVStore]


def create_store(
    config: KVTransferConfig,
    block_bytes: int,
    first: StoreFactory | None = None,
    direct: DirectDonor | DirectReceiver | None = None,
    part_bytes: int | None = None,
) -> TieredStore | None:
    """Return the configured stores as one store, or None if no store is configured.

    first(block_bytes): Makes a store that precedes the configured stores. direct: Result of `create_connector`, the
    first store of a prefill engine and the last store of a decode engine. part_bytes: Bytes of a block's first KV
    group, or None if the model has one group. Stores are opened at first use. Raises `ConfigError` if the disk limit is
    below one block.
    """
    stores: list[KVStore] = [] if first is None else [first(block_bytes)]
    directory, max_bytes = config.disk_dir, config.disk_bytes
    if directory is not None:
        DiskStore.check_bound(block_bytes, max_bytes)
        make = partial(DiskStore, directory, block_bytes, max_bytes, part_bytes=part_bytes)
        stores.append(GuardedStore("disk", block_bytes, make))
    if config.mooncake is not None:
        stores.append(_mooncake(config, config.mooncake, block_bytes))
    if direct is not None:
        guarded = GuardedStore.of(direct, may_wait=True, keeps_parts=False)  # decode engines ask for whole blocks
        stores.insert(0, guarded) if config.role == "prefill" else stores.append(guarded)
    return TieredStore(stores) if stores else None


def host_bytes(config: KVTransferConfig, block_bytes: int) -> int:
    """Return the stores' host memory in bytes."""
    of_pool = 0 if config.mooncake is None else MooncakeStore.host_bytes(block_bytes, config.mooncake_segment_bytes)
    return of_pool + direct_host_bytes(config, block_bytes)


def _mooncake(config: KVTransferConfig, master: str, block_bytes: int) -> GuardedStore:
    guard = GuardedStore(
        MooncakeStore.name,
        block_bytes,
        partial(
            MooncakeStore,
            block_bytes,
            master=master,
            protocol=config.mooncake_protocol,
            segment_bytes=config.mooncake_segment_bytes,
        ),
    )
    guard.check_when_idle()
    return guard
