"""Blocks stored with only the first KV group, because the other groups' content was evicted before the save.

A request can use such a block if no row reads the other groups any more. The bytes are the beginning of the whole
block, with another key.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from octavo.data.kv_groups import longest_hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.kv_groups import KVGroupKind
    from octavo.kv_transfer.tiers import TieredStore, TierTally

_PREFIX = b"without its window part"  # must not change: stores have such keys


def key_of_first_group(key: bytes) -> bytes:
    """Return the key for the block with only the first group."""
    return hashlib.sha256(_PREFIX + key).digest()


def num_usable(is_whole: list[bool], first: int, num_tokens: int, block_size: int, kinds: Sequence[KVGroupKind]) -> int:
    """Return the number of leading blocks after which a request can resume.

    is_whole: True for each block with all groups. first: Index of the first block. The request has all earlier blocks.
    kinds: Kinds of all groups except the first.
    """
    count, before = len(is_whole), -1
    while count != before:
        before = count
        for kind in kinds:
            count = longest_hit(kind, is_whole[:count], num_tokens, block_size, first_block=first)
    return count


def find_blocks(
    store: TieredStore,
    keys: Sequence[bytes],
    first: int,
    num_tokens: int,
    block_size: int,
    kinds: Sequence[KVGroupKind],
) -> list[bool]:
    """Return `is_whole` of `num_usable` for the leading keys that a store has."""
    if not kinds:
        return [True] * store.num_matched(keys)
    is_whole: list[bool] = []
    while len(is_whole) < len(keys):
        before = len(is_whole)
        is_whole += [True] * store.num_matched(keys[before:])
        rest = keys[len(is_whole) :]
        is_whole += [False] * (store.num_matched(rest, only_first_group=True) if rest else 0)
        if len(is_whole) == before:
            break
    # The store may also have the whole block, which matters for the blocks that the next row reads.
    num_computed = min((first + len(is_whole)) * block_size, num_tokens - 1)
    start = max(min(kind.first_position(num_computed) for kind in kinds) // block_size - first, 0)
    if False in is_whole[start:]:
        count = store.num_matched(keys[start : len(is_whole)])
        is_whole[start : start + count] = [True] * count
    return is_whole


def load(
    store: TieredStore,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    needs_all: Sequence[bool],
    part_bytes: int,
    tally: TierTally,
) -> int:
    """Fill blocks in order. Return the number of leading blocks with the needed content.

    needs_all: True for each block that needs all groups. part_bytes: Bytes of the first group.
    """
    done, only_first_group = 0, False
    while done < len(keys):
        end = len(keys)
        if only_first_group:
            end = next((index for index in range(done, end) if needs_all[index]), end)
        into = [block[:part_bytes] if only_first_group else block for block in blocks[done:end]]
        count = store.load(keys[done:end], into, tally, only_first_group=only_first_group) if into else 0
        if not count and (done or only_first_group):  # the next block is stored under neither key
            break
        done += count
        only_first_group = not only_first_group
    return done


def save(
    store: TieredStore,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    has_all: Sequence[bool],
    part_bytes: int,
    tally: TierTally,
) -> int:
    """Save blocks, even after a failed block. Return the number of leading blocks that are now stored.

    has_all: True for each block with all groups.
    """
    first = num_kept = 0
    while first < len(keys):
        is_whole, end = has_all[first], first
        while end < len(keys) and has_all[end] == is_whole:
            end += 1
        content = [block if is_whole else block[:part_bytes] for block in blocks[first:end]]
        count = store.save(keys[first:end], content, tally, only_first_group=not is_whole)
        num_kept += count if num_kept == first else 0
        first = end
    return num_kept
