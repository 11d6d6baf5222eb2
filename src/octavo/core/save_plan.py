"""Which blocks are saved, and with which parts.

A store is asked for the blocks of a sequence from its beginning on: a block after one that it lacks is of no use. So a
block that lost its part in some KV group is saved with the first group's alone. That is enough for a request that goes
on so far after it that no row reads the other parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups import longest_hit
from octavo.core.kv.prefix_cache import ComputedBlocks
from octavo.data.kv_groups import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import SchedulerConfig
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv_connector import KVConnector
    from octavo.data.request import Request

_SAVE_SHARE = 8  # at most one of so many blocks is pinned for saves at once; the others are offered again later


def most_pinned_blocks(manager: KVCacheManager) -> int:
    """Return how many blocks of the first group may be pinned for saves at once."""
    return max(manager.pool.num_blocks // _SAVE_SHARE, 1)


def most_saved_blocks(manager: KVCacheManager, config: SchedulerConfig) -> int:
    """Return how many blocks may be pinned for saves at once together with their parts in all groups.

    In the other groups that is everything that running requests and a step leave: a block that waits for its turn may
    lose a part meanwhile, and is found by fewer requests then.
    """
    most = most_pinned_blocks(manager)
    num_all, num_for_step = manager.pool.num_usable_blocks, manager.num_blocks_for(config.max_num_batched_tokens)
    for group in manager.bounded:
        num_left = group.num_beside(config.max_num_seqs, num_all, num_for_step)
        most = min(most, max(num_left, group.num_blocks // _SAVE_SHARE, 1))
    return most


def blocks_to_save(
    manager: KVCacheManager, request: Request, indices: Sequence[int], connector: KVConnector
) -> tuple[list[int], list[list[int]]]:
    """Return which of a request's blocks at these indices are saved, and their ids in each group.

    The store has none of them whole. A block that lost a part in some group is saved, with the first group's alone, if
    the store lacks even that; the other groups then have `NO_BLOCK`.
    """
    table = request.sequence.block_table
    parts = {index: _parts_of(manager, request, index) for index in indices}
    lost = [request.block_hashes[index] for index, ids in parts.items() if ids is None]
    wanted = connector.keys_to_save(lost, only_first_group=True) if lost else set()
    chosen = [index for index, ids in parts.items() if ids is not None or request.block_hashes[index] in wanted]
    nothing = [NO_BLOCK] * len(manager.bounded)
    rows = [[table[index], *(parts[index] or nothing)] for index in chosen]
    return chosen, [[row[group] for row in rows] for group in range(len(manager.groups))]


def _parts_of(manager: KVCacheManager, request: Request, index: int) -> list[int] | None:
    """Return the ids of a block's parts in all groups but the first; None if it has lost one."""
    ids = [group.id_at(request.sequence, index) for group in manager.bounded]
    there = [block_id for block_id in ids if block_id is not None]
    return there if len(there) == len(ids) else None


def whole_hit(
    manager: KVCacheManager, request: Request, computed: ComputedBlocks, lacking: set[BlockHash]
) -> ComputedBlocks:
    """Cut a hit to blocks that a store has, or that it can be given now.

    lacking: hashes of the blocks that the store lacks. It is given blocks of the device only.
    """
    bounded, blocks = manager.bounded, computed.blocks
    for index, block_hash in enumerate(request.block_hashes[: computed.num_blocks]):
        if block_hash not in lacking:
            continue
        if index >= len(blocks) or any(group.id_of(blocks[index]) is None for group in bounded):
            num_usable = longest_hit(bounded, blocks[:index], (), request.num_tokens)
            return ComputedBlocks(blocks[:num_usable], num_usable * manager.block_size)
    return computed
