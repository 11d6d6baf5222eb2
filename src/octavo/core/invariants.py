"""What must hold of the core between any two calls, checked from the outside.

The numbers are those of docs/reliability.md. Simulations check after every step, an engine whenever it is idle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.admission import ReservationAdmission
from octavo.core.window_blocks import NO_PART
from octavo.data.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.core.kv_cache_manager import KVCacheManager
    from octavo.core.scheduler import Scheduler
    from octavo.data.request import Request


@dataclass(frozen=True, slots=True)
class Breach:
    """An invariant that does not hold, and the blocks or window blocks whose books are wrong, if it is one of these."""

    invariant: int
    message: str
    block_ids: tuple[int, ...] = ()
    window_block_ids: tuple[int, ...] = ()


def check(scheduler: Scheduler) -> list[Breach]:
    """Return every breach; an empty list when all is well. Changes nothing. O(blocks + requests)."""
    manager = scheduler.kv_cache_manager
    return [
        *_check_partition(manager),
        *_check_references(scheduler),
        *_check_index(manager),
        *_check_tables(scheduler),
        *_check_windows(scheduler),
        *_check_host(scheduler),
        *_check_states(scheduler),
        *_check_limits(scheduler),
        *_check_idle(scheduler),
    ]


def quarantine(scheduler: Scheduler, breach: Breach) -> tuple[int, ...]:
    """Take a breach's blocks and window blocks out of use; return the blocks that were not before."""
    pool = scheduler.kv_cache_manager.pool
    fresh = tuple(block_id for block_id in breach.block_ids if block_id not in pool.quarantined)
    for block_id in fresh:
        pool.quarantine(pool.blocks[block_id])
    for part in breach.window_block_ids:
        scheduler.kv_cache_manager.windows.quarantine(part)
    return fresh


def _check_partition(manager: KVCacheManager) -> Iterator[Breach]:
    """1: FREE, CACHED, OWNED and QUARANTINED partition the blocks, and no list holds a block twice."""
    pool = manager.pool
    free = pool.free_list()
    cached = [block.block_id for block in pool.cached_blocks()]
    held = [block.block_id for block in pool.blocks if block.ref_count and block.block_id not in pool.quarantined]
    count = Counter([*free, *cached, *held, *pool.quarantined])
    wrong = tuple(block.block_id for block in pool.blocks if count[block.block_id] != 1)
    if wrong or sum(count.values()) != pool.num_blocks:
        yield Breach(1, f"blocks in no place or in several: {wrong}", wrong)


def _check_references(scheduler: Scheduler) -> Iterator[Breach]:
    """2: a block's references are its occurrences in tables and pins."""
    manager = scheduler.kv_cache_manager
    count = Counter(block.block_id for block in manager.pinned_blocks())
    for request in scheduler.requests.values():
        count.update(request.sequence.block_table)
    blocks = manager.pool.blocks
    checked = (block for block in blocks if block.block_id not in manager.pool.quarantined)
    wrong = tuple(block.block_id for block in checked if block.ref_count != count[block.block_id])
    if wrong:
        found = [(block_id, blocks[block_id].ref_count, count[block_id]) for block_id in wrong]
        yield Breach(2, f"(block, references, holders): {found}", wrong)


def _check_index(manager: KVCacheManager) -> Iterator[Breach]:
    """5: the index names exactly the blocks with a hash."""
    hashed = [block for block in manager.pool.blocks if block.hash is not None]
    wrong = tuple(block.block_id for block in hashed if manager.pool.indexed(block.hash) is not block)
    if wrong or len(hashed) != manager.pool.num_cached_blocks:
        yield Breach(5, f"{len(hashed)} blocks have a hash, {manager.pool.num_cached_blocks} are indexed", wrong)
    for block in hashed:
        if len(block.token_ids) != manager.block_size:
            yield Breach(5, f"{block} is findable and not full", (block.block_id,))


def _check_tables(scheduler: Scheduler) -> Iterator[Breach]:
    """3: tables are as long as their tokens need, no block twice. 4: what is still to be written is private."""
    manager = scheduler.kv_cache_manager
    size = manager.block_size
    for request in scheduler.requests.values():
        table, name = request.sequence.block_table, request.request_id
        if len(table) < manager.num_blocks_for(request.num_computed_tokens):
            yield Breach(3, f"{name}: {len(table)} blocks for {request.num_computed_tokens} tokens")
        if len(table) > manager.num_blocks_for(max(request.max_total_tokens, request.num_tokens)):
            yield Breach(3, f"{name}: {len(table)} blocks, more than it can ever need")
        if len(set(table)) != len(table):
            yield Breach(3, f"{name}: a block twice in {table}", tuple(table))
        for block_id in table[request.num_computed_tokens // size :]:
            block = manager.pool.blocks[block_id]
            pinned = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if block.hash is not None or block.ref_count > 1 + pinned:
                yield Breach(4, f"{name} is to write into {block}, which others may read", (block_id,))


def _check_windows(scheduler: Scheduler) -> Iterator[Breach]:
    """1, 2: window blocks are free, cached or held, as often as tables and pins say. 3: a request has those it sees.

    5: a window block is a part of one block at most, and what is cached can be found.
    """
    manager = scheduler.kv_cache_manager
    windows, every = manager.windows, range(manager.windows.num_blocks)
    free, cached, parts = windows.free_blocks(), windows.cached_blocks(), windows.parts()
    holders = Counter(manager.pinned_window_blocks())
    for request in scheduler.requests.values():
        yield from _check_window(scheduler, request)
        holders.update(request.sequence.window_table[request.sequence.num_behind_window :])
    usable = [part for part in every if part not in windows.quarantined]
    places = Counter([*free, *cached, *filter(windows.num_holders, usable), *windows.quarantined])
    wrong = tuple(part for part in every if places[part] != 1)
    if wrong or sum(places.values()) != windows.num_blocks:
        yield Breach(1, f"window blocks in no place or in several: {wrong}", window_block_ids=wrong)
    wrong = tuple(part for part in usable if windows.num_holders(part) != holders[part])
    if wrong:
        found = [(part, windows.num_holders(part), holders[part]) for part in wrong]
        yield Breach(2, f"(window block, holds, holders): {found}", window_block_ids=wrong)
    block_of = {part: block_id for part in every if (block_id := windows.block_of(part)) is not None}
    unsaid = set(block_of.items()) ^ {(part, block_id) for block_id, part in parts.items()}
    named = {part for part, _ in unsaid}
    wrong = tuple(part for part in every if part in named)
    if wrong:
        message = f"window blocks that are the part of another block than that says: {wrong}"
        yield Breach(5, message, window_block_ids=wrong)
    findable = {part for part, block_id in block_of.items() if manager.pool.blocks[block_id].hash is not None}
    wrong = (*(part for part in free if part in block_of), *(part for part in cached if part not in findable))
    if wrong:
        message = f"free window blocks that are a part, or cached ones that nobody finds: {wrong}"
        yield Breach(5, message, window_block_ids=wrong)


def _check_window(scheduler: Scheduler, request: Request) -> Iterator[Breach]:
    windows, sequence, name = scheduler.kv_cache_manager.windows, request.sequence, request.request_id
    table, behind, size = sequence.window_table, sequence.num_behind_window, scheduler.kv_cache_manager.block_size
    holds_all = request.status is RequestStatus.RUNNING and windows.num_blocks > 0
    if holds_all and not behind <= windows.first_block(request.num_computed_tokens) <= behind + 1:
        yield Breach(3, f"{name} has let go {behind} window blocks with {request.num_computed_tokens} tokens")
    if holds_all and len(table) * size < request.num_computed_tokens:
        yield Breach(3, f"{name}: {len(table)} window blocks for {request.num_computed_tokens} tokens")
    if len(table) > len(sequence.block_table):
        yield Breach(3, f"{name}: more window blocks than blocks")
    if [part == NO_PART for part in table] != [index < behind for index in range(len(table))]:
        yield Breach(3, f"{name}: {behind} blocks are behind the window in {table}")
    if windows.num_blocks and sequence.num_slots != size * len(table):
        yield Breach(3, f"{name}: room for {sequence.num_slots} tokens is not what its tables have")


def _check_host(scheduler: Scheduler) -> Iterator[Breach]:
    """1: host blocks are free, cached, or hold KV of one preempted request. 5: the index names exactly the cached ones.

    6: content that has one name is the same here and on the device. 10: who has KV there was preempted.
    """
    manager = scheduler.kv_cache_manager
    host, saved = manager.host, manager.saved_blocks()
    held, cached = [block for blocks in saved.values() for block in blocks], host.cached_blocks()
    places = [*held, *(block.block_id for block in cached), *host.free_block_ids()]
    if sorted(places) != list(range(host.num_blocks)):
        yield Breach(1, "host blocks in no place or in several")
    if len(cached) != host.num_cached_blocks or any(host.indexed(block.hash) is not block for block in cached):
        yield Breach(5, f"{len(cached)} host blocks are cached, {host.num_cached_blocks} are indexed")
    if any(len(block.token_ids) != manager.block_size for block in cached):
        yield Breach(5, "a host block is findable and not full")
    contents: dict[object, object] = {block.name: (block.token_ids, block.extra_keys, block.parent) for block in cached}
    for block in manager.pool.blocks:
        mine = block.token_ids, block.extra_keys, block.parent
        if contents.get(block.name, mine) != mine:
            yield Breach(6, f"{block} has the name of other content in host memory", (block.block_id,))
    for name in saved:
        request = scheduler.requests.get(name)
        if request is None or request.status is not RequestStatus.PREEMPTED:
            yield Breach(10, f"{name} has KV in host memory and is not preempted")


def _check_states(scheduler: Scheduler) -> Iterator[Breach]:
    """10: who waits holds nothing. 11: drafts belong to the running. 12: everyone is in exactly one place."""
    places: Counter[str] = Counter()
    for request in scheduler.room:
        places[request.request_id] += 1
        if request.status not in {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
            yield Breach(12, f"{request} waits")
        if request.sequence.block_table or request.num_computed_tokens or request.spec_token_ids:
            yield Breach(10, f"{request} waits and holds blocks, computed tokens or drafts")
    for request in scheduler.running:
        places[request.request_id] += 1
        if request.status is not RequestStatus.RUNNING:
            yield Breach(12, f"{request} runs")
        if not 0 <= request.num_computed_tokens < request.num_tokens:
            yield Breach(9, f"{request} has nothing left to compute")
    for request in scheduler.transfers.requests():
        places[request.request_id] += 1
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            yield Breach(12, f"{request} waits for KV")
    if set(places) != set(scheduler.requests) or any(count != 1 for count in places.values()):
        yield Breach(12, f"in no place or in several: {places.keys() ^ scheduler.requests.keys()}, {places}")


def _check_limits(scheduler: Scheduler) -> Iterator[Breach]:
    """13: limits hold, and sums are what they are sums of. 14: all that waits fits the empty cache."""
    config, room = scheduler.config, scheduler.room
    if len(scheduler.running) + len(scheduler.transfers) > config.max_num_seqs:
        yield Breach(
            13, f"{len(scheduler.running)} run, {len(scheduler.transfers)} load; the limit is {config.max_num_seqs}"
        )
    if room.num_tokens != sum(request.num_tokens for request in room):
        yield Breach(13, f"{room.num_tokens} tokens are said to wait")
    admission = scheduler.admission
    if isinstance(admission, ReservationAdmission):
        holders = [*scheduler.running, *scheduler.transfers.requests()]
        if admission.num_reserved_total != sum(request.max_total_tokens for request in holders):
            yield Breach(13, f"{admission.num_reserved_total} tokens are reserved, for other requests than run")
        if admission.num_reserved_total > admission.max_total_tokens:
            yield Breach(13, f"{admission.num_reserved_total} tokens are reserved of {admission.max_total_tokens}")
    for request in room:
        if request.num_tokens > scheduler.kv_cache_manager.capacity_tokens + 1:
            yield Breach(14, f"{request} waits and can never fit")


def _check_idle(scheduler: Scheduler) -> Iterator[Breach]:
    """18: with no requests and no transfers nothing is held, and nothing is remembered of anybody."""
    manager = scheduler.kv_cache_manager
    if scheduler.requests or manager.pinned_blocks():
        return
    held = tuple(b.block_id for b in manager.pool.blocks if b.ref_count and b.block_id not in manager.pool.quarantined)
    if held:
        yield Breach(18, f"blocks {held} are held by nobody", held)
    windows = manager.windows
    parts = tuple(part for part in range(windows.num_blocks) if windows.num_holders(part))
    held = tuple(part for part in parts if part not in windows.quarantined)
    if held:
        yield Breach(18, f"window blocks {held} are held by nobody", window_block_ids=held)
    kept = scheduler.num_kept_records
    if kept:
        yield Breach(18, f"{kept} records are kept of requests that are gone")
