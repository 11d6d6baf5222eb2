"""Moves between tiers."""

from __future__ import annotations

from typing import NamedTuple

DEVICE, HOST = "device", "host"  # each store has its own name


class TierMove(NamedTuple):
    """Blocks moved between the device and one tier. seconds: the tier's time."""

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float


class EndedTransfer(NamedTuple):
    """An ended transfer, with its number of moved leading blocks.

    moves: by tier. evicted: (tier, blocks since the last report).
    """

    transfer_id: int
    num_blocks: int
    moves: tuple[TierMove, ...] = ()
    evicted: tuple[tuple[str, int], ...] = ()
