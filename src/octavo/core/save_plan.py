"""Which blocks may be saved, where layers with a window keep a part of them beside it.

A store has both parts of a block. So a block that has lost its window part is not saved, and what follows it in a
sequence is of no use to anybody: a store is asked from the beginning on.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from octavo.core.prefix_cache import ComputedBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import SchedulerConfig
    from octavo.core.block_hash import BlockHash
    from octavo.core.kv_cache_manager import KVCacheManager
    from octavo.core.window_blocks import WindowBlocks
    from octavo.data.request import Request
    from octavo.data.request import Sequence as TokenSequence

_SAVE_SHARE = 8  # at most one of so many blocks is pinned for saves at once; the others are offered again later


def most_saved_blocks(manager: KVCacheManager, config: SchedulerConfig) -> int:
    """Return how many blocks may be pinned for saves at once.

    Of window blocks all that windows and a step leave: what waits for its turn may lose its window part meanwhile.
    """
    windows, pool = manager.windows, manager.pool
    share = max(pool.num_blocks // _SAVE_SHARE, 1)
    if not windows.num_blocks:
        return share
    num_for_step = manager.num_blocks_for(config.max_num_batched_tokens)
    num_running = config.max_num_seqs * windows.share(pool.num_usable_blocks) + num_for_step
    return max(min(windows.num_blocks - num_running, share), windows.num_blocks // _SAVE_SHARE, 1)


def window_parts(windows: WindowBlocks, sequence: TokenSequence, indices: Sequence[int]) -> list[int]:
    """Return the window parts of a request's blocks at these indices, up to the first that has none any more."""
    parts = (windows.part_at(sequence, index) for index in indices)
    return [part for part in takewhile(lambda part: part is not None, parts) if part is not None]


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
