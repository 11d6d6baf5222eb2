"""Blocks in stores without their window parts, where these were gone before anything was saved.

Such a block is of use to whoever goes on so far behind it that no layer with a window sees it. It stands under a key
of its own, since a key has one content for ever, and is shorter: the window part comes last in a stored block. Lookups
take blocks of both kinds, as far as all are whole that the next row sees.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.kv_transfer.tiers import TieredStore, TierTally

_PREFIX = b"without its window part"


def key_without_window(key: bytes) -> bytes:
    """Return the key of a block without its window part."""
    return hashlib.sha256(_PREFIX + key).digest()


def num_usable(is_whole: Sequence[bool], first: int, num_tokens: int, block_size: int, window: int) -> int:
    """Return behind how many of these blocks, of which the first is a sequence's block `first`, one can go on.

    is_whole: whether each has its window part. num_tokens: of the sequence, of which one is always computed. Blocks
    before the first are the caller's.
    """
    run = usable = 0
    for count, has_window_part in enumerate(is_whole, 1):
        run = run + 1 if has_window_part else 0
        seen = first_seen((first + count) * block_size, num_tokens, block_size, window)
        if run >= min(count, first + count - seen):
            usable = count
    return usable


def first_seen(num_computed_tokens: int, num_tokens: int, block_size: int, window: int) -> int:
    """Return the first block that the next row sees in its window once so many of a sequence's tokens are computed."""
    return max(min(num_computed_tokens, num_tokens - 1) - window + 1, 0) // block_size


def look_up(
    store: TieredStore, keys: Sequence[bytes], first: int, num_tokens: int, block_size: int, window: int
) -> int:
    """Return behind how many of a sequence's blocks, of which a store is asked for these, one can go on.

    Asks the store, which may wait. The arguments are those of `num_usable`.
    """
    is_whole: list[bool] = []
    while len(is_whole) < len(keys):
        before = len(is_whole)
        is_whole += [True] * store.num_matched(keys[before:])
        rest = keys[len(is_whole) :]
        is_whole += [False] * (store.num_matched(rest, without_window=True) if rest else 0)
        if len(is_whole) == before:
            break
    # It may have some of them in both ways. What is seen behind the last one decides most.
    seen = first_seen((first + len(is_whole)) * block_size, num_tokens, block_size, window)
    start = max(seen - first, 0)
    if False in is_whole[start:]:
        count = store.num_matched(keys[start : len(is_whole)])
        is_whole[start : start + count] = [True] * count
    return num_usable(is_whole, first, num_tokens, block_size, window)


def load(
    store: TieredStore,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    needs_window: Sequence[bool],
    part_bytes: int,
    tally: TierTally,
) -> int:
    """Fill blocks in order; return how many, from the first one on, are there as they are needed.

    needs_window: of which blocks the window part is needed. part_bytes: of a block without it.
    """
    done, without_window = 0, False
    while done < len(keys):
        end = len(keys)
        if without_window:
            end = next((index for index in range(done, end) if needs_window[index]), end)
        into = [block[:part_bytes] if without_window else block for block in blocks[done:end]]
        count = store.load(keys[done:end], into, tally, without_window=without_window) if into else 0
        if not count and (done or without_window):  # the next one is there neither way
            break
        done += count
        without_window = not without_window
    return done


def save(
    store: TieredStore,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    has_window: Sequence[bool],
    part_bytes: int,
    tally: TierTally,
) -> int:
    """Keep blocks, each with its window part where it has one; return how many, from the first one on, are kept now.

    Those behind one that could not be kept are kept all the same: who has that one next saves it alone.
    part_bytes: of a block without it.
    """
    first = num_kept = 0
    while first < len(keys):
        is_whole, end = has_window[first], first
        while end < len(keys) and has_window[end] == is_whole:
            end += 1
        content = [block if is_whole else block[:part_bytes] for block in blocks[first:end]]
        count = store.save(keys[first:end], content, tally, without_window=not is_whole)
        num_kept += count if num_kept == first else 0
        first = end
    return num_kept
