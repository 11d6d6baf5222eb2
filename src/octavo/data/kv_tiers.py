"""What the tiers of the KV cache did: those behind the device are host memory, and stores outside."""

from __future__ import annotations

from typing import NamedTuple

DEVICE, HOST = "device", "host"  # stores have names of their own


class TierMove(NamedTuple):
    """Blocks that went between the device and one tier: for one transfer, or in the copies of one step.

    seconds: what the tier took for it.
    """

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float


class EndedTransfer(NamedTuple):
    """A transfer that ended: so many of its blocks, from the first on, were moved.

    moves: which tier gave or took how many of them. evicted: tiers, each with how many blocks made way for others in it
    since it was last told.
    """

    transfer_id: int
    num_blocks: int
    moves: tuple[TierMove, ...] = ()
    evicted: tuple[tuple[str, int], ...] = ()
