"""Chooses the KV blocks to save in an external store.

Each block of the first group has parts: the bounded groups' blocks with the same positions. If a part was evicted, the
first group's content is still saved, because lookups in a store stop at the first missing block. A prefix hit can use
this content if the next token does not read the part.

A recurrent state is saved under its own key, together with the block that it follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups import longest_hit
from octavo.core.kv.prefix_cache import ComputedBlocks
from octavo.data.kv_groups import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from octavo.config import ResolvedSchedulerConfig
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv_connector import KVConnector
    from octavo.data.request import Request

_SAVE_SHARE = 8  # saves may pin `num_blocks // _SAVE_SHARE` blocks


def most_pinned_blocks(manager: KVCacheManager) -> int:
    """Return how many of the first group's blocks pending saves may pin."""
    return max(manager.pool.num_blocks // _SAVE_SHARE, 1)


def most_saved_states(manager: KVCacheManager, config: ResolvedSchedulerConfig) -> int:
    """Return how many recurrent states pending saves may pin: those that requests do not need, but at least 1."""
    return 0 if manager.states is None else max(manager.states.num_blocks - config.max_num_seqs, 1)


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
    return chosen, [[row[group] for row in rows] for group in range(len(manager.groups_of_tokens))]


def states_to_save(
    manager: KVCacheManager, request: Request, indices: Iterable[int], connector: KVConnector
) -> dict[int, int]:
    """Return the slots of the checkpoints that the store lacks, by index of the block that the state follows."""
    if manager.checkpoints is None:
        return {}
    table, hashes = request.sequence.block_table, request.block_hashes
    slots = {index: manager.checkpoints.slot_after(table[index]) for index in indices}
    found = {index: slot for index, slot in slots.items() if slot is not None}
    wanted = connector.states_to_save([hashes[index] for index in found])
    return {index: slot for index, slot in found.items() if hashes[index] in wanted}


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
            return _shortened(manager, request, computed, index)
    return computed


def hit_with_state(
    manager: KVCacheManager,
    request: Request,
    computed: ComputedBlocks,
    connector: KVConnector,
    saving: AbstractSet[BlockHash],
) -> tuple[ComputedBlocks, int | None]:
    """Return a prefix hit, and the slot of its checkpoint if that must be saved now.

    Another engine starts with the state after the last full block. If the hit ends there, the request does not compute
    this state. If the store lacks the state and only host memory has it, the hit is shortened.

    saving: Hashes of blocks whose states are being saved.
    """
    last = manager.most_loaded_tokens(request.num_tokens) // manager.block_size
    if manager.checkpoints is None or not 0 < last <= computed.num_blocks:
        return computed, None
    key = request.block_hashes[last - 1]
    if key in saving or not connector.states_to_save([key]):
        return computed, None
    slot = None if computed.host_blocks else manager.checkpoints.group.id_of(computed.blocks[-1])
    return (_shortened(manager, request, computed, last - 1) if slot is None else computed), slot


def _shortened(manager: KVCacheManager, request: Request, computed: ComputedBlocks, most: int) -> ComputedBlocks:
    blocks = computed.blocks[:most]
    count = longest_hit(manager.prefix_cache.parted, blocks, (), request.num_tokens)
    name = blocks[count - 1].name if count and manager.states is not None else None
    return ComputedBlocks(blocks[:count], count * manager.block_size, num_shared=computed.num_shared, state_name=name)
