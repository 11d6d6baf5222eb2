"""The KV groups of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.groups.bounded import BoundedGroup
from octavo.core.kv.groups.full_attention import FullAttentionGroup
from octavo.core.kv.groups.interface import Claim, KVGroup
from octavo.core.kv.groups.states import StateGroup, borders_to_save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.core.kv.host_block_pool import HostBlock

__all__ = [
    "BoundedGroup",
    "Claim",
    "FullAttentionGroup",
    "KVGroup",
    "StateGroup",
    "borders_to_save",
    "longest_hit",
    "num_covered",
]


def longest_hit(
    groups: Sequence[BoundedGroup | StateGroup],
    blocks: Sequence[Block],
    host_blocks: Sequence[HostBlock],
    num_tokens: int,
) -> int:
    """Return the largest number of leading blocks after which a request can continue in every group."""
    count, is_shortened = len(blocks) + len(host_blocks), True
    while is_shortened:
        before = count
        for group in groups:
            count = group.longest_hit(blocks, host_blocks, num_tokens, count)
        is_shortened = count < before and len(groups) > 1
    return count


def num_covered(groups: Sequence[BoundedGroup], blocks: Sequence[Block], num_tokens: int) -> int:
    """Return the index of the first block without a part that the token at position `num_tokens` reads.

    If no part is missing, return `len(blocks)`.
    """
    return min((group.num_covered(blocks, num_tokens) for group in groups), default=len(blocks))
