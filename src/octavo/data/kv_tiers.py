"""Moves of blocks between the tiers of the KV cache: the device, host memory, and external stores."""

from __future__ import annotations

from typing import NamedTuple

DEVICE, HOST = "device", "host"  # each store has its own name


class TierMove(NamedTuple):
    """Blocks moved between the device and one tier: by one transfer, or by the copies of one step.

    seconds: time that the tier took.
    """

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float


class EndedTransfer(NamedTuple):
    """A transfer that ended, with the number of its leading blocks that were moved.

    moves: blocks that each tier gave or took. evicted: (tier, number of blocks evicted from it since the last report).
    """

    transfer_id: int
    num_blocks: int
    moves: tuple[TierMove, ...] = ()
    evicted: tuple[tuple[str, int], ...] = ()
