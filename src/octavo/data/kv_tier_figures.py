"""Figures of KV tiers (device, host, stores)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.data import events
from octavo.data.kv_tiers import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.data.events import Event
    from octavo.data.kv_tiers import TierMove


@dataclass(slots=True)
class KVTierFigures:
    """Totals of one tier. Host memory includes KV of preempted requests."""

    num_hit_tokens: int = 0  # tokens found when requests first start
    num_loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    num_saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    num_evicted: int = 0
    wait_seconds: float = 0.0  # waiting time of the loads that `computing_seconds` covers
    computing_seconds: float = 0.0  # estimated time to compute the same tokens instead


class TierShare(NamedTuple):
    """One tier's share of a load."""

    move: TierMove
    num_tokens: int
    wait_s: float
    computing_s: float


def shares_of(load: events.KVLoadEnded) -> Iterator[TierShare]:
    """Yield each tier's share of a load.

    Divides the waiting time in proportion to each tier's time, and other figures in proportion to blocks.
    """
    num_blocks = sum(move.num_blocks for move in load.moves)
    seconds = sum(move.seconds for move in load.moves)
    for move in load.moves:
        part = move.num_blocks / num_blocks
        wait_s = load.seconds * (move.seconds / seconds if seconds else part)
        yield TierShare(move, load.num_tokens * move.num_blocks // num_blocks, wait_s, load.computing_s * part)


class KVTierCounter:
    """Counts events by tier."""

    def __init__(self, figures: dict[str, KVTierFigures]) -> None:
        self.figures = figures
        self._found: list[events.HostBlocksFound] = []  # events of the newest step, until `HostBlocksCopied`

    def _tier(self, name: str) -> KVTierFigures:
        return self.figures.setdefault(name, KVTierFigures())

    def emit(self, event: Event) -> None:
        """Count an event."""
        match event:
            case events.PrefixCacheQueried():
                self._tier(DEVICE).num_hit_tokens += event.num_hit_tokens - event.num_host_tokens
                self._tier(HOST).num_hit_tokens += event.num_host_tokens
            case events.HostBlocksFound():
                self._found = [each for each in self._found if each.step == event.step] + [event]
            case events.HostBlocksCopied():
                self._take_copies(event)
            case events.KVLoadEnded():
                self._take_load(event)
            case events.KVSaveEnded():
                for move in event.moves:
                    self._add_saved(move)
            case events.BlockEvicted():
                self._tier(DEVICE).num_evicted += 1
            case events.HostBlockEvicted():
                self._tier(HOST).num_evicted += 1
            case events.StoreBlocksEvicted():
                self._tier(event.tier).num_evicted += event.num_blocks

    def _take_copies(self, event: events.HostBlocksCopied) -> None:
        self._add_saved(event.saved)
        self._add_loaded(event.loaded)
        tier = self._tier(HOST)
        for found in self._found:
            if found.step == event.step and found.computing_s:
                tier.wait_seconds += event.loaded.seconds * found.num_blocks / event.loaded.num_blocks
                tier.computing_seconds += found.computing_s
        self._found = []

    def _take_load(self, event: events.KVLoadEnded) -> None:
        for share in shares_of(event):
            self._add_loaded(share.move)
            tier = self._tier(share.move.tier)
            tier.num_hit_tokens += 0 if event.resumed else share.num_tokens
            if event.computing_s:
                tier.wait_seconds += share.wait_s
                tier.computing_seconds += share.computing_s

    def _add_loaded(self, move: TierMove) -> None:
        tier = self._tier(move.tier)
        tier.num_loaded_blocks += move.num_blocks
        tier.loaded_bytes += move.num_bytes
        tier.load_seconds += move.seconds

    def _add_saved(self, move: TierMove) -> None:
        tier = self._tier(move.tier)
        tier.num_saved_blocks += move.num_blocks
        tier.saved_bytes += move.num_bytes
        tier.save_seconds += move.seconds
