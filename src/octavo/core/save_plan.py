"""Chooses the KV blocks to save in an external store.

Each block of the first group has parts: the bounded groups' blocks with the same positions. If a part was evicted, the
first group's content is still saved, because lookups in a store stop at the first missing block. A prefix hit can use
this content if the next token does not read the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups import longest_hit
from octavo.core.kv.prefix_cache import ComputedBlocks
from octavo.data.kv_groups import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import ResolvedSchedulerConfig
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv_connector import KVConnector
    from octavo.data.request import Request

_SAVE_SHARE = 8  # saves may pin `num_blocks // _SAVE_SHARE` blocks


def most_pinned_blocks(manager: KVCacheManager) -> int:
    """Return how many of the first group's blocks pending saves may pin."""
    return max(manager.pool.num_blocks // _SAVE_SHARE, 1)


def most_saved_blocks(manager: KVCacheManager, config: ResolvedSchedulerConfig) -> int:
    """Return the maximum number of blocks that pending saves pin together with all parts.

    This is the smallest limit of all groups. A bounded group's limit is the number of blocks that `max_num_seqs`
    requests and one step do not need, but at least `num_blocks // _SAVE_SHARE` and at least 1.
    """
    most = most_pinned_blocks(manager)
    num_all, num_for_step = manager.pool.num_usable_blocks, manager.num_blocks_for(config.max_num_batched_tokens)
    for group in manager.bounded:
        num_left = group.num_spare_blocks(config.max_num_seqs, num_all, num_for_step)
        most = min(most, max(num_left, group.num_blocks // _SAVE_SHARE, 1))
    return most


def blocks_to_save(
    manager: KVCacheManager, request: Request, indices: Sequence[int], connector: KVConnector
) -> tuple[list[int], list[list[int]]]:
    """Return the indices of the blocks to save, and for each group the ids of these blocks.

    A block with a missing part is saved only if the store wants the first group's content alone. Its ids in all bounded
    groups are then `NO_BLOCK`.

    indices: Candidates, as indices in the request's block table.
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
    ids = [group.id_at(request.sequence, index) for group in manager.bounded]
    there = [block_id for block_id in ids if block_id is not None]
    return there if len(there) == len(ids) else None


def whole_hit(
    manager: KVCacheManager, request: Request, computed: ComputedBlocks, lacking: set[BlockHash]
) -> ComputedBlocks:
    """Return `computed`, shortened until each block is in the store or can be saved with all parts.

    lacking: Hashes of the blocks that the store lacks.
    """
    bounded, blocks = manager.bounded, computed.blocks
    for index, block_hash in enumerate(request.block_hashes[: computed.num_blocks]):
        if block_hash not in lacking:
            continue
        if index >= len(blocks) or any(group.id_of(blocks[index]) is None for group in bounded):
            num_usable = longest_hit(bounded, blocks[:index], (), request.num_tokens)
            return ComputedBlocks(blocks[:num_usable], num_usable * manager.block_size)
    return computed
