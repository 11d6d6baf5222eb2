"""Several stores used as one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.data.kv_tiers import TierMove
from octavo.kv_transfer.group_parts import key_of_first_group
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.interface import StoreStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.kv_store_figures import KVStoreFigures
    from octavo.kv_transfer.interface import KVStore


class TierTally:
    """Moved blocks, bytes and seconds by store."""

    def __init__(self) -> None:
        self._moves: dict[str, TierMove] = {}

    def add(self, store: GuardedStore, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Add one call that moved num_blocks."""
        if num_blocks:
            _, count, size, took = self._moves.get(store.name, TierMove(store.name, 0, 0, 0.0))
            self._moves[store.name] = TierMove(store.name, count + num_blocks, size + num_bytes, took + seconds)

    def moves(self) -> tuple[TierMove, ...]:
        """Return per-store totals."""
        return tuple(self._moves.values())


class TieredStore:
    """A `KVStore` over several stores, the fastest first. Skips a store that fails or hangs, and raises nothing.

    A block is saved to each store that lacks the block. only_first_group: True if blocks have only the first KV group
    (`octavo.kv_transfer.group_parts`). `keys` are still those of whole blocks. Stores without such blocks are skipped.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        self.tiers = [store if isinstance(store, GuardedStore) else GuardedStore.of(store) for store in stores]
        self.name = ", ".join(tier.name for tier in self.tiers)
        self._tiers_of_parts = [tier for tier in self.tiers if tier.keeps_parts]
        self.block_bytes = self.tiers[0].block_bytes

    @property
    def figures(self) -> dict[str, KVStoreFigures]:
        """Figures by store."""
        return {tier.name: tier.figures for tier in self.tiers}

    @property
    def is_usable(self) -> bool:
        """True if any store is usable."""
        return any(tier.is_usable for tier in self.tiers)

    def open(self) -> None:
        """Open all stores."""
        for tier in self.tiers:
            tier.open()

    def _usable_tiers(self, *, only_first_group: bool) -> list[GuardedStore]:
        return self._tiers_of_parts if only_first_group else self.tiers

    def num_matched(self, keys: Sequence[bytes], *, only_first_group: bool = False) -> int:
        """See `KVStore`."""
        count, names, tiers = (
            0,
            _names(keys, only_first_group=only_first_group),
            self._usable_tiers(only_first_group=only_first_group),
        )
        while count < len(names):
            before = count
            for tier in tiers:
                if count < len(names):
                    count += tier.num_matched(names[count:])
            if count == before or len(tiers) == 1:
                break
        return count

    def lacks(self, keys: Sequence[bytes], *, only_first_group: bool = False) -> set[bytes]:
        """Return the keys that any store lacks. If only_first_group, a store with the whole block lacks nothing."""
        tiers = self._usable_tiers(only_first_group=only_first_group)
        return set().union(*(_lacking(tier, keys, only_first_group=only_first_group) for tier in tiers))

    def take_evicted(self) -> tuple[tuple[str, int], ...]:
        """Return (name, blocks evicted since the last call) of stores that evicted blocks."""
        return tuple((tier.name, count) for tier in self.tiers if (count := tier.take_evicted()))

    def load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        tally: TierTally | None = None,
        *,
        only_first_group: bool = False,
    ) -> int:
        """Fill each block from the first store that has the block. tally: Counts moved blocks.

        Returns the number of leading valid blocks.
        """
        done, tally = 0, tally or TierTally()
        names, tiers = (
            _names(keys, only_first_group=only_first_group),
            self._usable_tiers(only_first_group=only_first_group),
        )
        while done < len(names):
            count = _load_next(tiers, names[done:], blocks[done:], tally)
            if not count:
                break
            done += count
        return done

    def save(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        tally: TierTally | None = None,
        *,
        only_first_group: bool = False,
    ) -> int:
        """Save each block to the stores that lack the block. Return how many leading blocks are now in any store."""
        kept, tally = set[bytes](), tally or TierTally()
        names = _names(keys, only_first_group=only_first_group)
        for tier in self._usable_tiers(only_first_group=only_first_group):
            if not tier.is_usable:
                continue
            lacking = _lacking(tier, keys, only_first_group=only_first_group)
            chosen = [index for index, key in enumerate(keys) if key in lacking]
            kept.update(key for key in keys if key not in lacking)
            if chosen:
                start = time.perf_counter()
                count = tier.save([names[index] for index in chosen], [blocks[index] for index in chosen])
                num_bytes = sum(len(blocks[index]) for index in chosen[:count])
                tally.add(tier, count, num_bytes, time.perf_counter() - start)
                kept.update(keys[index] for index in chosen[:count])
        return next((index for index, key in enumerate(keys) if key not in kept), len(keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `KVStore`."""
        for tier in self.tiers:
            tier.forget(keys)

    def stats(self) -> StoreStats:
        """Return the sums. error is "" if any store is usable."""
        each = [tier.stats() for tier in self.tiers]
        bounds = [stats.max_bytes for stats in each]
        known = [bound for bound in bounds if bound is not None]
        return StoreStats(
            sum(stats.num_blocks for stats in each),
            sum(stats.num_bytes for stats in each),
            sum(known) if len(known) == len(bounds) else None,
            sum(stats.num_evicted for stats in each),
            sum(stats.num_corrupt for stats in each),
            sum(stats.num_errors for stats in each),
            ""
            if self.is_usable
            else "; ".join(f"{tier.name}: {stats.error}" for tier, stats in zip(self.tiers, each, strict=True)),
        )

    def close(self) -> None:
        """Close all stores."""
        for tier in self.tiers:
            tier.close()


def _names(keys: Sequence[bytes], *, only_first_group: bool) -> Sequence[bytes]:
    return [key_of_first_group(key) for key in keys] if only_first_group else keys


def _lacking(tier: GuardedStore, keys: Sequence[bytes], *, only_first_group: bool) -> set[bytes]:
    lacking = tier.lacks(keys)
    if not only_first_group:
        return lacking
    keys_by_name = {key_of_first_group(key): key for key in lacking}
    return {keys_by_name[name] for name in tier.lacks(list(keys_by_name))}


def _load_next(
    tiers: Sequence[GuardedStore], names: Sequence[bytes], blocks: Sequence[memoryview], tally: TierTally
) -> int:
    for index, tier in enumerate(tiers):
        start = time.perf_counter()
        is_last = index == len(tiers) - 1  # needs no lookup, because a store has the block
        count = len(names) if is_last else tier.num_matched(names)
        loaded = tier.load(names[:count], blocks[:count]) if count else 0
        tally.add(tier, loaded, sum(map(len, blocks[:loaded])), time.perf_counter() - start)
        if loaded:
            return loaded
    return 0
