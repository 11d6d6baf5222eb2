"""Which blocks are saved, and with which parts, where layers with a window keep a part of them beside it.

A store is asked from a sequence's beginning on: what follows a block that it has not is of no use to anybody. So a
block that has lost its window part is saved without it, which is enough for whoever goes on behind its window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.prefix_cache import ComputedBlocks
from octavo.core.window_blocks import NO_PART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import SchedulerConfig
    from octavo.core.block_hash import BlockHash
    from octavo.core.kv_cache_manager import KVCacheManager
    from octavo.core.kv_connector import KVConnector
    from octavo.core.window_blocks import WindowBlocks
    from octavo.data.request import Request

_SAVE_SHARE = 8  # at most one of so many blocks is pinned for saves at once; the others are offered again later


def most_pinned_blocks(manager: KVCacheManager) -> int:
    """Return how many blocks may be pinned for saves at once, whether window blocks are pinned with them or not."""
    return max(manager.pool.num_blocks // _SAVE_SHARE, 1)


def most_saved_blocks(manager: KVCacheManager, config: SchedulerConfig) -> int:
    """Return how many blocks may be pinned for saves at once together with their window parts.

    Of window blocks all that windows and a step leave: what waits for its turn may lose its window part meanwhile, and
    is then found by fewer.
    """
    windows, pool, share = manager.windows, manager.pool, most_pinned_blocks(manager)
    if not windows.num_blocks:
        return share
    num_for_step = manager.num_blocks_for(config.max_num_batched_tokens)
    num_running = config.max_num_seqs * windows.share(pool.num_usable_blocks) + num_for_step
    return max(min(windows.num_blocks - num_running, share), windows.num_blocks // _SAVE_SHARE, 1)


def with_window_parts(
    windows: WindowBlocks, request: Request, indices: Sequence[int], connector: KVConnector
) -> tuple[list[int], list[int]]:
    """Return which of a request's blocks at these indices are to be saved, and their window parts.

    A store lacks all of them whole. NO_PART: it is gone, and the store has not even what is left of the block.
    """
    parts = {index: windows.part_at(request.sequence, index) for index in indices}
    lost = [request.block_hashes[index] for index, part in parts.items() if part is None]
    wanted = connector.keys_to_save(lost, without_window=True) if lost else set()
    chosen = [index for index, part in parts.items() if part is not None or request.block_hashes[index] in wanted]
    return chosen, [NO_PART if (part := parts[index]) is None else part for index in chosen]


def whole_hit(
    manager: KVCacheManager, request: Request, computed: ComputedBlocks, lacking: set[BlockHash]
) -> ComputedBlocks:
    """Cut what was found of a request to blocks that a store has, or that it can be given now.

    lacking: hashes of what the store has not. It is given blocks of the device only.
    """
    windows, blocks = manager.windows, computed.blocks
    for index, block_hash in enumerate(request.block_hashes[: computed.num_blocks]):
        if block_hash in lacking and (index >= len(blocks) or windows.part(blocks[index]) is None):
            num_usable = windows.num_usable(blocks[:index], (), request.num_tokens)
            return ComputedBlocks(blocks[:num_usable], num_usable * manager.block_size)
    return computed
