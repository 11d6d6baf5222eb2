"""Checks the invariants of docs/reliability.md, which hold between any two calls into the core."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.admission import ReservationAdmission
from octavo.data.kv_groups import NO_BLOCK
from octavo.data.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.core.kv.groups import BoundedGroup, KVGroup, StateGroup
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.scheduler import Scheduler
    from octavo.data.request import Request


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken invariant, with its number in docs/reliability.md."""

    invariant: int
    message: str
    block_ids: tuple[int, ...] = ()  # blocks of `group` with wrong bookkeeping
    group: int = 0


def check(scheduler: Scheduler) -> list[Breach]:
    """Return all broken invariants."""
    manager = scheduler.kv_cache_manager
    return [
        *(breach for group in manager.groups for breach in _check_group(scheduler, group)),
        *_check_index(manager),
        *_check_tables(scheduler),
        *(breach for group in manager.bounded for breach in _check_bounded(scheduler, group)),
        *_check_state_slots(scheduler),
        *_check_host(scheduler),
        *_check_states(scheduler),
        *_check_limits(scheduler),
        *_check_idle(scheduler),
    ]


def quarantine(scheduler: Scheduler, breach: Breach) -> tuple[int, ...]:
    """Take a breach's blocks out of use. Return the ids of the first group's newly quarantined blocks."""
    group = scheduler.kv_cache_manager.groups[breach.group]
    fresh = tuple(block_id for block_id in breach.block_ids if block_id not in group.quarantined)
    for block_id in fresh:
        group.quarantine(block_id)
    return () if breach.group else fresh


def _check_group(scheduler: Scheduler, group: KVGroup) -> Iterator[Breach]:
    every, index = range(group.num_blocks), group.index
    holders = Counter(scheduler.kv_cache_manager.pinned_ids(index))
    states = scheduler.kv_cache_manager.states
    for request in scheduler.requests.values():
        holders.update(block_id for block_id in request.sequence.block_tables[index] if block_id != NO_BLOCK)
        if states is not None and states.index == index:
            holders.update(request.sequence.saves.pending.values())
    usable = [block_id for block_id in every if block_id not in group.quarantined]
    held = filter(group.num_holders, usable)
    places = Counter([*group.free_ids(), *group.cached_ids(), *held, *group.quarantined])
    wrong = tuple(block_id for block_id in every if places[block_id] != 1)
    if wrong or sum(places.values()) != group.num_blocks:
        yield Breach(1, f"blocks of group {index} in no list or in several lists: {wrong}", wrong, index)
    wrong = tuple(block_id for block_id in usable if group.num_holders(block_id) != holders[block_id])
    if wrong:
        found = [(block_id, group.num_holders(block_id), holders[block_id]) for block_id in wrong]
        yield Breach(2, f"(block of group {index}, holds, holders): {found}", wrong, index)


def _check_index(manager: KVCacheManager) -> Iterator[Breach]:
    hashed = [block for block in manager.pool.blocks if block.hash is not None]
    wrong = tuple(block.block_id for block in hashed if manager.pool.indexed(block.hash) is not block)
    if wrong or len(hashed) != manager.pool.num_cached_blocks:
        yield Breach(5, f"{len(hashed)} blocks have a hash, {manager.pool.num_cached_blocks} are indexed", wrong)
    for block in hashed:
        if len(block.token_ids) != manager.block_size:
            yield Breach(5, f"{block} is indexed but not full", (block.block_id,))


def _check_tables(scheduler: Scheduler) -> Iterator[Breach]:
    manager = scheduler.kv_cache_manager
    size = manager.block_size
    for request in scheduler.requests.values():
        table, name = request.sequence.block_table, request.request_id
        if len(table) < manager.num_blocks_for(request.num_computed_tokens):
            yield Breach(3, f"{name}: {len(table)} blocks for {request.num_computed_tokens} tokens")
        if len(table) > manager.num_blocks_for(max(request.max_total_tokens, request.num_tokens)):
            yield Breach(3, f"{name}: {len(table)} blocks, more than it can ever need")
        if len(set(table)) != len(table):
            yield Breach(3, f"{name}: a block occurs twice in {table}", tuple(table))
        for block_id in table[request.num_computed_tokens // size :]:
            block = manager.pool.blocks[block_id]
            pinned = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if block.hash is not None or block.ref_count > 1 + pinned:
                yield Breach(4, f"{name} would write into {block}, which other requests may read", (block_id,))


def _check_bounded(scheduler: Scheduler, group: BoundedGroup) -> Iterator[Breach]:
    for request in scheduler.requests.values():
        yield from _check_bounded_table(scheduler, group, request)
    yield from _check_parts(scheduler, group)


def _check_state_slots(scheduler: Scheduler) -> Iterator[Breach]:
    group, size = scheduler.kv_cache_manager.states, scheduler.kv_cache_manager.block_size
    if group is None:
        return
    for request in scheduler.requests.values():
        sequence, name = request.sequence, request.request_id
        table, pending = sequence.block_tables[group.index], list(sequence.saves.pending)
        if len(table) != bool(sequence.block_table):
            yield Breach(3, f"{name}: {len(table)} slots of states, {len(sequence.block_table)} blocks")
        if pending and (pending != sorted(pending) or pending[-1] * size > request.num_tokens):
            yield Breach(3, f"{name}: states after blocks {pending} are being saved")
    yield from _check_parts(scheduler, group)
    yield from _check_host_states(scheduler.kv_cache_manager)


def _check_host_states(manager: KVCacheManager) -> Iterator[Breach]:
    assert manager.checkpoints is not None
    host = manager.checkpoints.host
    places = [*manager.saved_states(), *host.cached_slots(), *host.free_slots()]
    places += [slot for slot, name in host.lent.items() if name is None]
    if sorted(places) != list(range(host.num_slots)):
        yield Breach(1, f"host slots of states in no list or in several lists: {sorted(places)}")


def _check_parts(scheduler: Scheduler, group: BoundedGroup | StateGroup) -> Iterator[Breach]:
    every, free, cached = range(group.num_blocks), group.free_ids(), group.cached_ids()
    blocks = scheduler.kv_cache_manager.pool.blocks
    block_of = {each: first_id for each in every if (first_id := group.block_of(each)) is not None}
    unsaid = set(block_of.items()) ^ {(each, first_id) for first_id, each in group.parts().items()}
    named = {each for each, _ in unsaid}
    wrong = tuple(each for each in every if each in named)
    if wrong:
        message = f"blocks of group {group.index} whose partial block does not match their record: {wrong}"
        yield Breach(5, message, wrong, group.index)
    findable = {each for each, first_id in block_of.items() if blocks[first_id].hash is not None}
    wrong = (*(each for each in free if each in block_of), *(each for each in cached if each not in findable))
    if wrong:
        message = (
            f"free blocks of group {group.index} that have a partial block, or cached blocks without an index entry: "
            f"{wrong}"
        )
        yield Breach(5, message, wrong, group.index)


def _check_bounded_table(scheduler: Scheduler, group: BoundedGroup, request: Request) -> Iterator[Breach]:
    sequence, name, size = request.sequence, request.request_id, scheduler.kv_cache_manager.block_size
    table, first = sequence.block_tables[group.index], sequence.first_held[group.index]
    is_running = request.status is RequestStatus.RUNNING
    num_tokens = request.num_computed_tokens
    earliest = group.first_read(max(num_tokens - size, 0))  # blocks are released only after a block fills
    if is_running and not earliest <= first <= group.first_read(num_tokens):
        yield Breach(3, f"{name} has released {first} blocks of group {group.index} with {num_tokens} tokens")
    if len(table) * size < num_tokens:
        yield Breach(3, f"{name}: {len(table)} blocks of group {group.index} for {num_tokens} tokens")
    if len(table) > len(sequence.block_table):
        yield Breach(3, f"{name}: more blocks of group {group.index} than of the first")
    if [block_id == NO_BLOCK for block_id in table] != [index < first for index in range(len(table))]:
        yield Breach(3, f"{name}: the blocks before block {first} are released, not those in {table}")
    tables = sequence.block_tables[: 1 + len(scheduler.kv_cache_manager.bounded)]
    if sequence.num_slots != size * min(map(len, tables)):
        yield Breach(3, f"{name}: {sequence.num_slots} token slots do not match its block tables")


def _check_host(scheduler: Scheduler) -> Iterator[Breach]:
    manager = scheduler.kv_cache_manager
    host, saved = manager.host, manager.saved_blocks()
    held, cached = [block for blocks in saved.values() for block in blocks], host.cached_blocks()
    places = [*held, *(block.block_id for block in cached), *host.free_block_ids()]
    if sorted(places) != list(range(host.num_blocks)):
        yield Breach(1, "host blocks in no list or in several lists")
    if len(cached) != host.num_cached_blocks or any(host.indexed(block.hash) is not block for block in cached):
        yield Breach(5, f"{len(cached)} host blocks are cached, {host.num_cached_blocks} are indexed")
    if any(len(block.token_ids) != manager.block_size for block in cached):
        yield Breach(5, "a host block is indexed but not full")
    contents: dict[object, object] = {block.name: (block.token_ids, block.extra_keys, block.parent) for block in cached}
    for block in manager.pool.blocks:
        mine = block.token_ids, block.extra_keys, block.parent
        if contents.get(block.name, mine) != mine:
            yield Breach(6, f"{block} has the key of other content in host memory", (block.block_id,))
    for name in saved:
        request = scheduler.requests.get(name)
        if request is None or request.status is not RequestStatus.PREEMPTED:
            yield Breach(10, f"{name} has KV in host memory but is not preempted")


def _check_states(scheduler: Scheduler) -> Iterator[Breach]:
    places: Counter[str] = Counter()
    for request in scheduler.waiting_requests:
        places[request.request_id] += 1
        if request.status not in {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
            yield Breach(12, f"{request} waits")
        if request.sequence.block_table or request.num_computed_tokens or request.spec_token_ids:
            yield Breach(10, f"{request} waits but holds blocks, computed tokens or drafts")
    for request in scheduler.running:
        places[request.request_id] += 1
        if request.status is not RequestStatus.RUNNING:
            yield Breach(12, f"{request} runs")
        if not 0 <= request.num_computed_tokens < request.num_tokens:
            yield Breach(9, f"{request} has no tokens to compute")
    for request in scheduler.transfers.requests():
        places[request.request_id] += 1
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            yield Breach(12, f"{request} waits for KV")
    if set(places) != set(scheduler.requests) or any(count != 1 for count in places.values()):
        yield Breach(
            12, f"requests in no state or in several states: {places.keys() ^ scheduler.requests.keys()}, {places}"
        )


def _check_limits(scheduler: Scheduler) -> Iterator[Breach]:
    config, waiting_requests = scheduler.config, scheduler.waiting_requests
    num_running, num_loading = len(scheduler.running), len(scheduler.transfers)
    if num_running + num_loading > config.max_num_seqs:
        yield Breach(13, f"{num_running} run, {num_loading} load; the limit is {config.max_num_seqs}")
    if waiting_requests.num_tokens != sum(request.num_tokens for request in waiting_requests):
        yield Breach(13, f"{waiting_requests.num_tokens} tokens are counted as waiting")
    admission = scheduler.admission
    if isinstance(admission, ReservationAdmission):
        holders = [*scheduler.running, *scheduler.transfers.requests()]
        num_reserved = admission.num_reserved_total
        if num_reserved != sum(request.max_total_tokens for request in holders):
            yield Breach(13, f"{num_reserved} tokens are reserved, which differs from the running requests")
        if num_reserved > admission.max_total_tokens:
            yield Breach(13, f"{num_reserved} tokens are reserved of {admission.max_total_tokens}")
    for request in waiting_requests:
        if request.num_tokens > scheduler.kv_cache_manager.capacity_tokens + 1:
            yield Breach(14, f"{request} waits but cannot fit")


def _check_idle(scheduler: Scheduler) -> Iterator[Breach]:
    manager = scheduler.kv_cache_manager
    if scheduler.requests or manager.num_transfers:
        return
    for group in manager.groups:
        usable = (block_id for block_id in range(group.num_blocks) if block_id not in group.quarantined)
        held = tuple(filter(group.num_holders, usable))
        if held:
            yield Breach(18, f"blocks {held} of group {group.index} are held by no request", held, group.index)
    kept = scheduler.num_kept_records
    if kept:
        yield Breach(18, f"{kept} records of finished requests remain")
