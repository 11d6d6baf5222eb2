"""Moves of blocks between the tiers of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

DEVICE, HOST = "device", "host"  # each store has its own name


class TierMove(NamedTuple):
    """Blocks moved between the device and one tier. seconds: time that the tier took."""

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float


class EndedTransfer(NamedTuple):
    """A transfer that ended, with its number of moved leading blocks.

    moves: the blocks that each tier took or gave. evicted: (tier, number of blocks evicted since the last report).
    """

    transfer_id: int
    num_blocks: int
    moves: tuple[TierMove, ...] = ()
    evicted: tuple[tuple[str, int], ...] = ()
