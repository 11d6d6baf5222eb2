"""KV moved between tiers."""

from __future__ import annotations

from typing import NamedTuple

DEVICE, HOST = "device", "host"  # tiers; each store is a tier with its own name


class TierMove(NamedTuple):
    """Blocks moved between the device and one tier."""

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float  # time that the tier took


class EndedTransfer(NamedTuple):
    """Result of an ended load or save."""

    transfer_id: int
    num_blocks: int  # leading blocks that were moved
    moves: tuple[TierMove, ...] = ()  # one for each tier
    evicted: tuple[tuple[str, int], ...] = ()  # (tier, blocks evicted since the last report)
