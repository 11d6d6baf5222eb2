"""Transfers of KV between this engine and a store outside: what is fetched, what is saved, what was given up.

The blocks of a transfer are pinned until it has ended or the worker was told to give it up: nothing else is written
into what is loaded, nor into what is still to be read for a save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv_connector import NullConnector
from octavo.core.save_plan import blocks_to_save, most_pinned_blocks, most_saved_blocks, whole_hit
from octavo.core.transfer_cost import TransferCost
from octavo.data import events
from octavo.data.scheduler_output import KVTransfer, TransferDirection, are_whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.config import SchedulerConfig
    from octavo.core.event_emitter import EventEmitter
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.core.kv_connector import KVConnector
    from octavo.data.kv_tiers import TierMove
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput

_PROMPT_SHARE = 16  # tokens a request, from which on a step shows what prompts cost
_EXPECTED_LOOKUP_S = 5.0  # at least, for KV that another engine is about to have: who says it comes says it in time
_SAVED_TOGETHER = 8  # blocks of an answer: each save costs a store more than its bytes, on disk a file


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A transfer under way. request: who waits for it, None for a save. num_present: its blocks before the first one.

    started, deadline: seconds of the core's clock.
    """

    order: KVTransfer
    request: Request | None
    num_present: int
    started: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A question to the store that it has not answered yet."""

    num_computed_tokens: int
    deadline: float


class KVTransfers:
    """The only user of the connector, and of pins in the KV cache. The state of a request is its caller's.

    Ids are never used twice, so a late or double completion finds nothing. store_name: "" where there is no store.
    most_saved_blocks: number of blocks that are pinned for saves at once with their parts in all KV groups, without
    those that are handed over to another engine.
    learns_steps: whether KV can come from anywhere but the device, so that what computing takes is of interest.
    reports_dropped_saves: whether the store is asked about blocks that are not saved when a request ends, for an event.
    A replay sets it to False for journals of versions that did not ask.
    """

    def __init__(
        self,
        connector: KVConnector,
        kv_cache_manager: KVCacheManager,
        config: SchedulerConfig,
        emitter: EventEmitter,
    ) -> None:
        self._connector = connector
        self.has_store = not isinstance(connector, NullConnector)
        self.store_name = connector.name
        self.learns_steps = self.has_store or kv_cache_manager.host.num_blocks > 0
        self._manager = kv_cache_manager
        self._emitter = emitter
        self._timeout_s = config.kv_transfer_timeout_s
        self._lookup_timeout_s = config.kv_lookup_timeout_s
        self._min_tokens = max(config.min_tokens_to_cache, 1)
        self._cost = TransferCost()
        self._pending: dict[int, PendingTransfer] = {}
        self._load_of: dict[str, int] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._num_offered: dict[str, int] = {}  # blocks of a request that the store was asked about
        self._saving: set[BlockHash] = set()  # of the blocks that are pinned for saves with their parts in all groups
        self._saving_in_part: set[BlockHash] = set()  # and of those that lost a part, so only the first group's is
        self.reports_dropped_saves = True
        self.most_saved_blocks = most_saved_blocks(kv_cache_manager, config) if self.has_store else 0
        self._most_pinned = most_pinned_blocks(kv_cache_manager)
        self._next_id = 0
        self._orders: list[KVTransfer] = []
        self._cancels: list[int] = []
        self._gave_up: set[str] = set()
        self._most_loaded: dict[str, int] = {}  # tokens of who asks once more, for what came of its load

    def __len__(self) -> int:
        """How many requests wait for their KV."""
        return len(self._load_of)

    @property
    def has_work(self) -> bool:
        """Whether the worker has to be told something, or asked what became of a transfer."""
        return bool(self._cancels or self._pending)

    @property
    def num_pending(self) -> int:
        """Transfers under way, and questions that the store has not answered."""
        return len(self._pending) + len(self._lookups)

    @property
    def num_records(self) -> int:
        """What is kept of single requests; 0 when nobody is left."""
        kept = self._load_of, self._gave_up, self._lookups, self._num_offered, self._most_loaded
        return sum(map(len, kept))

    def requests(self) -> list[Request]:
        """Return the requests that wait for their KV."""
        return [each.request for each in self._pending.values() if each.request is not None]

    def request_added(self, request: Request) -> None:
        """Tell the store of a newcomer."""
        self._connector.request_added(request)

    # --- look up ------------------------------------------------------------------------------------------------------

    def num_external_tokens(self, request: Request, computed: ComputedBlocks, *, may_wait: bool) -> int | None:
        """How many tokens behind what is computed here are to be fetched, whole blocks of them; None: not known yet.

        may_wait: whether the request can wait until it is known, for a short time; else there is nothing to fetch.
        """
        size = self._manager.block_size
        may_ask = self._manager.prefix_cache.reads_cache(request) and request.request_id not in self._gave_up
        is_whole = not computed.is_saved and computed.num_tokens == computed.num_blocks * size
        if not may_ask or not self.has_store or not is_whole:
            self._lookups.pop(request.request_id, None)
            return 0
        most_known = self._most_loaded.get(request.request_id, request.num_tokens // size * size)
        most = most_known - computed.num_tokens
        if min(most, request.num_tokens - 1 - computed.num_tokens) < self._min_tokens:
            self._lookups.pop(request.request_id, None)
            return 0
        self._manager.update_block_hashes(request)
        found = self._connector.get_num_new_matched_tokens(request, computed.num_tokens)
        if found is None:
            return self._wait_for_lookup(request, computed.num_tokens, may_wait=may_wait)
        self._lookups.pop(request.request_id, None)
        found = min(found, most) // size * size
        is_worth = request.expects_kv or self._cost.is_worth_loading(found)  # what is expected is computed already
        return found if found >= self._min_tokens and is_worth else 0

    def _wait_for_lookup(self, request: Request, num_computed_tokens: int, *, may_wait: bool) -> int | None:
        now, name = self._emitter.now, request.request_id
        lookup = self._lookups.get(name)
        if may_wait and (lookup is None or now < lookup.deadline):
            self._lookups[name] = _Lookup(
                num_computed_tokens, now + self._lookup_limit_s(request) if lookup is None else lookup.deadline
            )
            return None
        self._lookups.pop(name, None)
        self._gave_up.add(name)
        self._connector.lookup_given_up(request)
        return 0

    def _lookup_limit_s(self, request: Request) -> float:
        return max(self._lookup_timeout_s, _EXPECTED_LOOKUP_S) if request.expects_kv else self._lookup_timeout_s

    def is_looking_up(self, request: Request) -> bool:
        """Whether the store has still to say what it has of a request, and there is time left for it."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None or self._emitter.now >= lookup.deadline:
            return False
        return self._connector.get_num_new_matched_tokens(request, lookup.num_computed_tokens) is None

    # --- load ---------------------------------------------------------------------------------------------------------

    def start_load(self, request: Request, computed: ComputedBlocks, num_external_tokens: int) -> None:
        """Order a load of the tokens after the found ones into a request's blocks."""
        first, num_blocks = computed.num_blocks, num_external_tokens // self._manager.block_size
        loaded, sequence = slice(first, first + num_blocks), request.sequence
        block_ids = [table[loaded] for table in sequence.block_tables]
        order = self._order(TransferDirection.LOAD, request.block_hashes[loaded], block_ids, request, first)
        self._load_of[request.request_id] = order.transfer_id
        self._connector.update_state_after_alloc(request, list(sequence.block_table), num_external_tokens)
        self._emitter.emit(events.KVLoadStarted, request.request_id, order.transfer_id, num_external_tokens)

    def _order(
        self,
        direction: TransferDirection,
        keys: list[bytes],
        block_ids: list[list[int]],
        request: Request | None = None,
        num_present: int = 0,
    ) -> KVTransfer:
        name, now = None if request is None else request.request_id, self._emitter.now
        order = KVTransfer(self._next_id, direction, keys, block_ids, name)
        self._next_id += 1
        self._pending[order.transfer_id] = PendingTransfer(order, request, num_present, now, now + self._timeout_s)
        self._manager.pin(order.transfer_id, block_ids)
        self._orders.append(order)
        self._connector.transfer_ordered(order)
        return order

    def num_computed_tokens(self, load: PendingTransfer, num_blocks: int) -> int:
        """Return how many tokens of a request are computed with so many blocks of its load: one is always left.

        0 if the load ended so early that the next row would not find all blocks that it reads.
        """
        assert load.request is not None
        num_tokens = min((load.num_present + num_blocks) * self._manager.block_size, load.request.num_tokens - 1)
        sequence = load.request.sequence
        is_enough = all(group.has_read_blocks(sequence, num_tokens) for group in self._manager.bounded)
        return num_tokens if is_enough else 0

    # --- save ---------------------------------------------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """Order saves of the blocks of a request that can be shared by now and that the store wants, if there is room.

        Blocks of the prompt are saved at once, those of the answer several together or when the request ends. Until
        then the request holds them in the first group; other groups may let go of their parts. A request whose KV is
        handed over to another engine has all of its blocks saved: nothing is offered again after its end.
        """
        if not self.has_store:
            return
        num_offered = self._num_offered.get(request.request_id, 0)
        is_prompt = num_offered < request.num_prompt_tokens // self._manager.block_size
        if is_prompt or self._manager.prefix_cache.num_committed_blocks(request) >= num_offered + _SAVED_TOGETHER:
            self._offer_all(request)

    def _offer_all(self, request: Request) -> None:
        name, block_hashes = request.request_id, request.block_hashes
        first, end = self._num_offered.get(name, 0), self._manager.prefix_cache.num_committed_blocks(request)
        if end <= first or end * self._manager.block_size < self._min_tokens:
            return
        if not request.hands_kv_over and not self._num_with_room([False]):
            return  # whatever the store wants
        wanted = self._connector.keys_to_save(block_hashes[first:end]) - self._saving
        if not request.hands_kv_over:
            wanted -= self._saving_in_part
        chosen = [index for index in range(first, end) if block_hashes[index] in wanted]
        chosen, block_ids = blocks_to_save(self._manager, request, chosen, self._connector)
        count = len(chosen) if request.hands_kv_over else self._num_with_room(are_whole(block_ids))
        self._num_offered[name] = end if count == len(chosen) else chosen[count]
        if count:
            self._save([block_hashes[index] for index in chosen[:count]], [ids[:count] for ids in block_ids])

    def _tell_dropped(self, request: Request) -> None:
        """Emit how many blocks the store still wants of a request that can no longer be saved."""
        first = self._num_offered.get(request.request_id, 0)
        end = self._manager.prefix_cache.num_committed_blocks(request)
        if end <= first or end * self._manager.block_size < self._min_tokens:
            return  # usually: the store is not asked, and a journal has no record of it
        wanted = self._connector.keys_to_save(request.block_hashes[first:end]) - self._saving - self._saving_in_part
        if wanted:
            self._emitter.emit(events.KVSavesDropped, request.request_id, len(wanted))

    def _num_with_room(self, is_whole: list[bool]) -> int:
        """Return how many of these blocks, from the first one on, can be pinned for a save now.

        is_whole: of each whether its parts in all groups are pinned.
        """
        room = min(len(is_whole), max(self._most_pinned - len(self._saving) - len(self._saving_in_part), 0))
        room_for_whole = max(self.most_saved_blocks - len(self._saving), 0)
        whole = [index for index in range(room) if is_whole[index]]
        return whole[room_for_whole] if len(whole) > room_for_whole else room

    def _save(self, keys: list[bytes], block_ids: list[list[int]]) -> None:
        order = self._order(TransferDirection.SAVE, keys, block_ids)
        in_part = _keys_in_part(order)
        self._saving_in_part |= in_part
        self._saving |= set(keys) - in_part
        self._emitter.emit(events.KVSaveStarted, order.transfer_id, len(keys))

    def hand_over_hit(self, request: Request, computed: ComputedBlocks) -> ComputedBlocks:
        """Return the part of a hit that is used: all of it, unless the request's KV is handed over to another engine.

        The other engine gets all blocks, or it has no use for any. So a block that lost a part in some group and that
        no store has is computed again. A block that no store has is saved at once, because it may have lost a part by
        the time the request runs.
        """
        bounded = self._manager.bounded
        if computed.is_saved or not (request.hands_kv_over and bounded):
            return computed
        hashes = request.block_hashes[: computed.num_blocks]
        lacking = self._connector.keys_to_save(hashes) - self._saving
        computed = whole_hit(self._manager, request, computed, lacking)
        blocks = [block for block in computed.blocks if block.hash in lacking]
        if blocks:
            keys = [block.hash for block in blocks if block.hash is not None]
            ids = [[group.id_of(block) for block in blocks] for group in self._manager.groups]
            self._save(keys, [[block_id for block_id in each if block_id is not None] for each in ids])
        return computed

    # --- it ends ------------------------------------------------------------------------------------------------------

    def end(
        self,
        transfer_id: int,
        num_blocks: int,
        moves: tuple[TierMove, ...] = (),
        evicted: tuple[tuple[str, int], ...] = (),
    ) -> PendingTransfer | None:
        """Take in that a transfer ended with so many blocks; return a load that somebody waits for, else None.

        A request that did not get all that was ordered does not ask the store again, with one exception: if the row
        after the loaded blocks would not find all blocks that it reads, the store is asked once more for fewer blocks,
        unless another engine hands them over. moves, evicted: as in `EndedTransfer`.
        """
        for tier, count in evicted:
            self._emitter.emit(events.StoreBlocksEvicted, tier, count)
        pending = self._pending.get(transfer_id)
        if pending is None:
            self._emitter.emit(events.StaleResultDropped, f"transfer {transfer_id} is over or unknown")
            return None
        order = pending.order
        self._manager.unpin(transfer_id)
        self._drop(pending, num_blocks, "done" if num_blocks == len(order.keys) else "failed", moves)
        if pending.request is None:
            return None
        name, was_asked_again = pending.request.request_id, pending.request.request_id in self._most_loaded
        self._most_loaded.pop(name, None)
        if num_blocks == len(order.keys):
            self._learn_load(pending, self._emitter.now)
        elif was_asked_again or pending.request.expects_kv or self.num_computed_tokens(pending, num_blocks):
            self._gave_up.add(name)
        else:
            self._most_loaded[name] = (pending.num_present + num_blocks) * self._manager.block_size
        return pending

    def _learn_load(self, load: PendingTransfer, now: float) -> None:
        """Take in how long a load has taken by now; that of KV which was still being computed tells nothing."""
        assert load.request is not None
        if not load.request.expects_kv:
            num_tokens = len(load.order.keys) * self._manager.block_size
            self._cost.learn_load(num_tokens, now - load.started)

    def computing_s(self, num_tokens: int) -> float:
        """Return how long computing so many tokens takes, as measured lately; 0 where it is not known."""
        return self._cost.computing_s(num_tokens)

    def learn_step(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step took, if prompts were most of it."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens >= _PROMPT_SHARE * len(scheduled.num_scheduled_tokens) > 0:
            self._cost.learn_step(num_tokens, seconds)

    def expired(self, now: float) -> list[Request]:
        """Give up saves that have taken too long; return the requests whose loads have: deadlines grow with ids."""
        late: list[PendingTransfer] = []
        waiting: list[Request] = []
        for pending in self._pending.values():
            if pending.deadline > now:
                break
            late.append(pending)
        for pending in late:
            if pending.request is None:
                self._cancel(pending, "expired")
            else:
                self._learn_load(pending, now)  # it takes so long at least
                waiting.append(pending.request)
        return waiting

    def cancel(self, request: Request, outcome: str) -> None:
        """Give up a request's load; it asks no more. Its blocks stay pinned until the worker has been told."""
        self._gave_up.add(request.request_id)
        self._cancel(self._pending[self._load_of[request.request_id]], outcome)

    def _cancel(self, pending: PendingTransfer, outcome: str) -> None:
        transfer_id = pending.order.transfer_id
        if pending.order in self._orders:  # the worker never hears of it
            self._orders.remove(pending.order)
            self._manager.unpin(transfer_id)
        else:
            self._cancels.append(transfer_id)
        self._drop(pending, None, outcome)

    def _drop(
        self, pending: PendingTransfer, num_blocks: int | None, outcome: str, moves: tuple[TierMove, ...] = ()
    ) -> None:
        order = pending.order
        del self._pending[order.transfer_id]
        self._connector.transfer_ended(order, num_blocks)
        if pending.request is None:
            in_part = _keys_in_part(order)
            self._saving_in_part -= in_part
            self._saving -= set(order.keys) - in_part
            self._emitter.emit(events.KVSaveEnded, order.transfer_id, num_blocks or 0, outcome, moves)
        else:
            del self._load_of[pending.request.request_id]
            name, num_tokens = pending.request.request_id, (num_blocks or 0) * self._manager.block_size
            seconds, resumed = self._emitter.now - pending.started, pending.request.num_preemptions > 0
            told = outcome, num_tokens, seconds, self.computing_s(num_tokens), self.store_name, moves, resumed
            self._emitter.emit(events.KVLoadEnded, name, order.transfer_id, *told)

    # --- with the worker ----------------------------------------------------------------------------------------------

    def take_orders(self) -> list[KVTransfer]:
        """Return the transfers that begin with the next step."""
        orders, self._orders = self._orders, []
        return orders

    def take_cancels(self) -> list[int]:
        """Return the transfers that were given up since the last step."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def end_cancels(self, transfer_ids: Iterable[int]) -> None:
        """Take in that the worker was told: blocks of these transfers are neither written nor read any more."""
        for transfer_id in transfer_ids:
            self._manager.unpin(transfer_id)

    def fail_step(self, orders: Iterable[KVTransfer], cancels: Iterable[int]) -> list[Request]:
        """Give up the orders of a step that failed and tell its cancels again; return whose loads these were."""
        self._cancels += cancels
        failed = []
        for order in orders:
            pending = self._pending.get(order.transfer_id)
            if pending is None:
                continue
            if pending.request is None:
                self._cancel(pending, "failed")
            else:
                self.cancel(pending.request, "failed")
                failed.append(pending.request)
        return failed

    def request_finished(self, request: Request) -> None:
        """Order the last saves of a request that ended, before its blocks are freed, and drop all records of it.

        Blocks that find no room are not saved; an event counts them.
        """
        if self.has_store:
            self._offer_all(request)
            if self.reports_dropped_saves:
                self._tell_dropped(request)
        self._gave_up.discard(request.request_id)
        self._lookups.pop(request.request_id, None)
        self._num_offered.pop(request.request_id, None)
        self._most_loaded.pop(request.request_id, None)
        self._connector.request_finished(request, list(request.sequence.block_table))


def _keys_in_part(order: KVTransfer) -> set[bytes]:
    """Return the keys of the blocks that a save takes without their parts in some group."""
    return {key for key, is_whole in zip(order.keys, are_whole(order.block_ids), strict=True) if not is_whole}
