"""Schedules transfers of KV between this engine and an external store.

A transfer's blocks stay pinned until the transfer ends, or the worker has received its cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from octavo.core.kv_connector import NullConnector
from octavo.core.pending_keys import PendingKeys
from octavo.core.save_plan import (
    blocks_to_save,
    hit_with_state,
    most_pinned_blocks,
    most_saved_blocks,
    most_saved_states,
    states_to_save,
    whole_hit,
)
from octavo.core.transfer_cost import TransferCost
from octavo.data import events
from octavo.data.scheduler_output import KVTransfer, TransferDirection, are_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.config import ResolvedSchedulerConfig
    from octavo.core.event_emitter import EventEmitter
    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.core.kv_connector import KVConnector
    from octavo.data.kv_tiers import EndedTransfer, TierMove
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput

_PROMPT_SHARE = 16  # a step with fewer tokens per request is mostly decodes
_EXPECTED_LOOKUP_S = 5.0  # minimum lookup timeout for KV from another engine
_SAVED_TOGETHER = 8  # blocks of generated tokens per save


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A transfer that has not ended."""

    order: KVTransfer
    request: Request | None  # None for a save
    num_present: int  # blocks before the loaded blocks
    started: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Lookup:
    num_computed_tokens: int
    deadline: float


class KVTransferScheduler:
    """Orders loads and saves of KV, and tracks pending transfers.

    Transfer ids are never reused.
    """

    def __init__(
        self,
        connector: KVConnector,
        kv_cache_manager: KVCacheManager,
        config: ResolvedSchedulerConfig,
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
        self._num_offered: dict[str, int] = {}  # leading blocks that were offered to the store
        self._saving = PendingKeys()  # blocks with all parts
        self._saving_in_part = PendingKeys()  # blocks without parts
        self._saving_states: set[BlockHash] = set()  # hashes of blocks whose states are in pending saves
        self.reports_dropped_saves = True  # False in replays of old journals
        # Limit on pinned blocks with all parts. Saves for another engine may exceed the limit.
        self.most_saved_blocks = most_saved_blocks(kv_cache_manager, config) if self.has_store else 0
        self._most_states = most_saved_states(kv_cache_manager, config)
        self._most_pinned = most_pinned_blocks(kv_cache_manager)
        self._next_id = 0
        self._orders: list[KVTransfer] = []
        self._cancels: list[int] = []
        self._abandoned: set[str] = set()
        self._most_loaded: dict[str, int] = {}  # maximum prefix length of a repeated load, in tokens

    def __len__(self) -> int:
        """Count pending loads."""
        return len(self._load_of)

    @property
    def has_work(self) -> bool:
        """Whether transfers or cancellations are pending."""
        return bool(self._cancels or self._pending)

    @property
    def num_pending(self) -> int:
        """Number of pending transfers and lookups."""
        return len(self._pending) + len(self._lookups)

    @property
    def num_records(self) -> int:
        """Number of records."""
        kept = self._load_of, self._abandoned, self._lookups, self._num_offered, self._most_loaded
        return sum(map(len, kept))

    def requests(self) -> list[Request]:
        """Return the requests that wait for a load."""
        return [each.request for each in self._pending.values() if each.request is not None]

    def request_added(self, request: Request) -> None:
        """Notify the store of a new request."""
        self._connector.request_added(request)

    def num_external_tokens(self, request: Request, computed: ComputedBlocks, *, may_wait: bool) -> int | None:
        """Return how many tokens to load after `computed`, or None if the store has not yet answered.

        The number is a multiple of the block size. Return 0 if loading would take longer than computing. If `may_wait`
        is False, return 0 instead of None.
        """
        size = self._manager.block_size
        may_ask = self._manager.prefix_cache.reads_cache(request) and request.request_id not in self._abandoned
        is_whole = not computed.is_saved and computed.num_tokens == computed.num_blocks * size
        most_known = self._most_loaded.get(request.request_id, self._manager.most_loaded_tokens(request.num_tokens))
        most = most_known - computed.num_tokens
        is_enough = min(most, request.num_tokens - 1 - computed.num_tokens) >= self._min_tokens
        if not (may_ask and self.has_store and is_whole and is_enough):
            self._lookups.pop(request.request_id, None)
            return 0
        self._manager.update_block_hashes(request)
        found = self._connector.get_num_new_matched_tokens(request, computed.num_tokens)
        if found is None:
            return self._wait_for_lookup(request, computed.num_tokens, may_wait=may_wait)
        self._lookups.pop(request.request_id, None)
        found = min(found, most) // size * size
        is_worth = request.expects_kv or self._cost.is_worth_loading(found)
        return found if found >= self._min_tokens and is_worth else 0

    def _wait_for_lookup(self, request: Request, num_computed_tokens: int, *, may_wait: bool) -> int | None:
        now, name = self._emitter.now, request.request_id
        lookup = self._lookups.get(name)
        if may_wait and (lookup is None or now < lookup.deadline):
            limit_s = max(self._lookup_timeout_s, _EXPECTED_LOOKUP_S) if request.expects_kv else self._lookup_timeout_s
            deadline = now + limit_s if lookup is None else lookup.deadline
            self._lookups[name] = _Lookup(num_computed_tokens, deadline)
            return None
        self._lookups.pop(name, None)
        self._abandoned.add(name)
        self._connector.lookup_given_up(request)
        return 0

    def is_looking_up(self, request: Request) -> bool:
        """Return True if a request's lookup is pending and has not timed out."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None or self._emitter.now >= lookup.deadline:
            return False
        return self._connector.get_num_new_matched_tokens(request, lookup.num_computed_tokens) is None

    def start_load(self, request: Request, computed: ComputedBlocks, num_external_tokens: int) -> None:
        """Order a load of `num_external_tokens` tokens into the request's blocks after `computed`."""
        first, num_blocks = computed.num_blocks, num_external_tokens // self._manager.block_size
        loaded, sequence = slice(first, first + num_blocks), request.sequence
        tables, states = sequence.block_tables, dict[int, int]()
        if self._manager.states is not None:
            *tables, (slot,) = tables
            states[num_blocks - 1] = slot
        block_ids = [table[loaded] for table in tables]
        order = self._order(TransferDirection.LOAD, request.block_hashes[loaded], block_ids, states, request, first)
        self._load_of[request.request_id] = order.transfer_id
        self._connector.update_state_after_alloc(request, list(sequence.block_table), num_external_tokens)
        self._emitter.emit(events.KVLoadStarted, request.request_id, order.transfer_id, num_external_tokens)

    def _order(
        self,
        direction: TransferDirection,
        keys: list[bytes],
        block_ids: list[list[int]],
        states: dict[int, int],
        request: Request | None = None,
        num_present: int = 0,
    ) -> KVTransfer:
        name, now = None if request is None else request.request_id, self._emitter.now
        order = KVTransfer(self._next_id, direction, keys, block_ids, name, states)
        self._next_id += 1
        self._pending[order.transfer_id] = PendingTransfer(order, request, num_present, now, now + self._timeout_s)
        self._manager.pin(order.transfer_id, block_ids, states.values())
        self._orders.append(order)
        self._connector.transfer_ordered(order)
        return order

    def num_computed_tokens(self, load: PendingTransfer, num_blocks: int) -> int:
        """Return how many tokens count as computed after a load of `num_blocks` blocks.

        The last token never counts, because a step must compute its logits. Return 0 if the request lacks a block or
        the recurrent state that the next token reads.
        """
        assert load.request is not None
        if load.order.states and num_blocks < len(load.order.keys):
            return 0
        num_tokens = min((load.num_present + num_blocks) * self._manager.block_size, load.request.num_tokens - 1)
        sequence = load.request.sequence
        is_enough = all(group.has_read_blocks(sequence, num_tokens) for group in self._manager.bounded)
        return num_tokens if is_enough else 0

    def offer(self, request: Request, saved_states: Sequence[int] = ()) -> None:
        """Save a request's committed blocks and states that the store lacks and wants.

        Prompt blocks are saved immediately, and blocks of generated tokens in batches of `_SAVED_TOGETHER`. A state
        that was saved after its block had been offered is offered at once, together with its block. Saves for another
        engine may pin any number of blocks.

        saved_states: See `KVCacheManager.commit`.
        """
        if not self.has_store:
            return
        name, num_committed = request.request_id, self._manager.prefix_cache.num_committed_blocks(request)
        num_offered = self._num_offered.get(name, 0)
        is_prompt = num_offered < request.num_prompt_tokens // self._manager.block_size
        is_due = is_prompt or num_committed >= num_offered + _SAVED_TOGETHER
        if saved_states and saved_states[0] <= num_offered:
            self._num_offered[name] = saved_states[0] - 1
        self._offer(request, num_committed if is_due else min(num_offered, num_committed))

    def _offer(self, request: Request, end: int) -> None:
        name, block_hashes = request.request_id, request.block_hashes
        first = self._num_offered.get(name, 0)
        if end <= first or end * self._manager.block_size < self._min_tokens:
            return
        if not request.hands_kv_over and not self._num_fitting([False]):
            return
        wanted = self._saving.lacking(self._connector.keys_to_save(block_hashes[first:end]))
        if not request.hands_kv_over:
            wanted = self._saving_in_part.lacking(wanted)
        states = self._states_to_save(request, range(first, end))
        chosen = [index for index in range(first, end) if block_hashes[index] in wanted or index in states]
        chosen, block_ids = blocks_to_save(self._manager, request, chosen, self._connector)
        count = len(chosen) if request.hands_kv_over else self._num_fitting(are_whole(block_ids))
        self._num_offered[name] = end if count == len(chosen) else chosen[count]
        if count:
            keys = [block_hashes[index] for index in chosen[:count]]
            slots = {place: states[index] for place, index in enumerate(chosen[:count]) if index in states}
            self._save(keys, [ids[:count] for ids in block_ids], slots)

    def _states_to_save(self, request: Request, indices: range) -> dict[int, int]:
        """Return slots by index. If too many states are pinned, the states after the last blocks are preferred."""
        hashes = request.block_hashes
        fresh = [index for index in indices if hashes[index] not in self._saving_states]
        states = states_to_save(self._manager, request, fresh, self._connector)
        num_free = len(states) if request.hands_kv_over else max(self._most_states - len(self._saving_states), 0)
        return dict([*states.items()][max(len(states) - num_free, 0) :])

    def _report_dropped_saves(self, request: Request) -> None:
        first = self._num_offered.get(request.request_id, 0)
        end = self._manager.prefix_cache.num_committed_blocks(request)
        if end <= first or end * self._manager.block_size < self._min_tokens:
            return
        wanted = self._saving.lacking(self._connector.keys_to_save(request.block_hashes[first:end]))
        wanted = self._saving_in_part.lacking(wanted)
        if wanted:
            self._emitter.emit(events.KVSavesDropped, request.request_id, len(wanted))

    def _num_fitting(self, is_whole: list[bool]) -> int:
        num_free = min(len(is_whole), max(self._most_pinned - len(self._saving) - len(self._saving_in_part), 0))
        num_free_whole = max(self.most_saved_blocks - len(self._saving), 0)
        whole = [index for index in range(num_free) if is_whole[index]]
        return whole[num_free_whole] if len(whole) > num_free_whole else num_free

    def _save(self, keys: list[bytes], block_ids: list[list[int]], states: dict[int, int]) -> None:
        order = self._order(TransferDirection.SAVE, keys, block_ids, states)
        in_part = _keys_in_part(order)
        self._saving_in_part.start(in_part)
        self._saving.start(set(keys) - in_part)
        self._saving_states |= {keys[index] for index in states}
        self._emitter.emit(events.KVSaveStarted, order.transfer_id, len(keys))

    def hand_over_hit(self, request: Request, computed: ComputedBlocks) -> ComputedBlocks:
        """If a request's KV is for another engine, save the blocks of its prefix hit that the store lacks.

        Return the hit. If such a block cannot be saved with all parts, return only the hit before the block.
        """
        manager = self._manager
        if computed.is_saved or not request.hands_kv_over or len(manager.groups) == 1:
            return computed
        lacking = set[bytes]()
        if manager.bounded:
            wanted = self._connector.keys_to_save(request.block_hashes[: computed.num_blocks])
            lacking = self._saving.lacking(wanted)
            computed = whole_hit(manager, request, computed, lacking)
        computed, slot = hit_with_state(manager, request, computed, self._connector, self._saving_states)
        last = None if slot is None else computed.blocks[-1].hash
        blocks = [block for block in computed.blocks if block.hash in lacking or block.hash == last]
        if blocks:
            keys = [block.hash for block in blocks if block.hash is not None]
            ids = [[group.id_of(block) for block in blocks] for group in manager.groups_of_tokens]
            states = {} if slot is None else {len(blocks) - 1: slot}
            self._save(keys, [[block_id for block_id in each if block_id is not None] for each in ids], states)
        return computed

    def end(self, ended: EndedTransfer) -> PendingTransfer | None:
        """Process the end of a transfer. Return the transfer if it is a pending load, otherwise None.

        If an incomplete load yields no usable tokens, the request asks the store once more for fewer blocks. KV from
        another engine is not requested again.
        """
        transfer_id, num_blocks, moves, evicted = ended
        for tier, count in evicted:
            self._emitter.emit(events.StoreBlocksEvicted, tier, count)
        pending = self._pending.get(transfer_id)
        if pending is None:
            self._emitter.emit(events.StaleResultDropped, f"transfer {transfer_id} has ended or is unknown")
            return None
        order = pending.order
        self._manager.unpin(transfer_id)
        self._drop(pending, num_blocks, "done" if num_blocks == len(order.keys) else "failed", moves)
        if pending.request is None:
            return None
        name, was_repeated = pending.request.request_id, pending.request.request_id in self._most_loaded
        self._most_loaded.pop(name, None)
        if num_blocks == len(order.keys):
            self._learn_load(pending, self._emitter.now)
        elif was_repeated or pending.request.expects_kv or self.num_computed_tokens(pending, num_blocks):
            self._abandoned.add(name)
        else:
            self._most_loaded[name] = (pending.num_present + num_blocks) * self._manager.block_size
        return pending

    def _learn_load(self, load: PendingTransfer, now: float) -> None:
        assert load.request is not None
        if not load.request.expects_kv:
            num_tokens = len(load.order.keys) * self._manager.block_size
            self._cost.learn_load(num_tokens, now - load.started)

    def computing_s(self, num_tokens: int) -> float:
        """See `TransferCost`."""
        return self._cost.computing_s(num_tokens)

    def learn_step(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Learn the time per token from a step, unless the step is mostly decodes."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens >= _PROMPT_SHARE * len(scheduled.num_scheduled_tokens) > 0:
            self._cost.learn_step(num_tokens, seconds)

    def expired(self, now: float) -> list[Request]:
        """Cancel overdue saves. Return the requests of overdue loads."""
        waiting: list[Request] = []
        for pending in list(takewhile(lambda each: each.deadline <= now, self._pending.values())):
            if pending.request is None:
                self._cancel(pending, "expired")
            else:
                self._learn_load(pending, now)
                waiting.append(pending.request)
        return waiting

    def cancel(self, request: Request, outcome: str) -> None:
        """Cancel a request's load. The request does not ask the store again."""
        self._abandoned.add(request.request_id)
        self._cancel(self._pending[self._load_of[request.request_id]], outcome)

    def _cancel(self, pending: PendingTransfer, outcome: str) -> None:
        transfer_id = pending.order.transfer_id
        if pending.order in self._orders:  # the order was not sent to the worker
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
            self._saving_in_part.end(in_part)
            self._saving.end(set(order.keys) - in_part)
            self._saving_states -= {order.keys[index] for index in order.states}
            self._emitter.emit(events.KVSaveEnded, order.transfer_id, num_blocks or 0, outcome, moves)
        else:
            del self._load_of[pending.request.request_id]
            name, num_tokens = pending.request.request_id, (num_blocks or 0) * self._manager.block_size
            seconds, resumed = self._emitter.now - pending.started, pending.request.num_preemptions > 0
            fields = outcome, num_tokens, seconds, self.computing_s(num_tokens), self.store_name, moves, resumed
            self._emitter.emit(events.KVLoadEnded, name, order.transfer_id, *fields)

    def take_orders(self) -> list[KVTransfer]:
        """Remove and return the new orders."""
        orders, self._orders = self._orders, []
        return orders

    def take_cancels(self) -> list[int]:
        """Remove and return the ids of newly cancelled transfers."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def end_cancels(self, transfer_ids: Iterable[int]) -> None:
        """Unpin the blocks of transfers after the worker has received their cancellation."""
        for transfer_id in transfer_ids:
            self._manager.unpin(transfer_id)

    def fail_step(self, orders: Iterable[KVTransfer], cancels: Iterable[int]) -> list[Request]:
        """Cancel the transfers of a failed step. Return the requests of cancelled loads.

        cancels: Ids of transfers that the step cancelled. The next step cancels them again.
        """
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
        """Start the last saves of a request, and drop its records. Call this before the request's blocks are freed."""
        if self.has_store:
            self._offer(request, self._manager.prefix_cache.num_committed_blocks(request))
            if self.reports_dropped_saves:
                self._report_dropped_saves(request)
        self._abandoned.discard(request.request_id)
        self._lookups.pop(request.request_id, None)
        self._num_offered.pop(request.request_id, None)
        self._most_loaded.pop(request.request_id, None)
        self._connector.request_finished(request, list(request.sequence.block_table))


def _keys_in_part(order: KVTransfer) -> set[bytes]:
    return {key for key, is_whole in zip(order.keys, are_whole(order.block_ids), strict=True) if not is_whole}
