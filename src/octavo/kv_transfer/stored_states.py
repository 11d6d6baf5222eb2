"""Recurrent states in stores.

A state is stored in pieces of a block's size, each under its own key. So the limits of stores and of transfers hold for
states, too. The key of a piece follows from the key of the block that the state follows.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from octavo.kv_transfer.group_parts import num_usable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.kv_groups import KVGroupKind
    from octavo.kv_transfer.tiers import TieredStore

_PREFIX = b"recurrent state, piece "


class FoundState(NamedTuple):
    """A stored state.

    num_usable: number of leading blocks after which a request can resume. num_pieces: present pieces of the state that
    was looked up last.
    """

    num_usable: int
    num_pieces: int


def count_pieces(state_bytes: int, block_bytes: int) -> int:
    """Return the number of pieces of a state."""
    return -(-state_bytes // block_bytes) if state_bytes else 0


def keys_of_state(key: bytes, num_pieces: int) -> list[bytes]:
    """Return the keys of the pieces of the state after a block."""
    return [hashlib.sha256(_PREFIX + index.to_bytes(4, "little") + key).digest() for index in range(num_pieces)]


def find_state(
    store: TieredStore,
    keys: Sequence[bytes],
    is_whole: list[bool],
    first: int,
    num_tokens: int,
    block_size: int,
    kinds: Sequence[KVGroupKind],
    *,
    num_pieces: int,
    most_lookups: int,
) -> FoundState:
    """Find the last stored state with which a request of `num_tokens` tokens can resume.

    Looks up at most `most_lookups` states, the last ones first. The last token is always computed, so no state that
    includes it can be used. Other arguments: see `num_usable`.
    """
    count, found = min(len(is_whole), (num_tokens - 1) // block_size - first), 0
    for _ in range(most_lookups):
        count = num_usable(is_whole[: max(count, 0)], first, num_tokens, block_size, kinds)
        if not count:
            break
        found = store.num_matched(keys_of_state(keys[count - 1], num_pieces))
        if found == num_pieces:
            return FoundState(count, found)
        count -= 1
    return FoundState(0, found)
