"""Transfers of KV from a store outside: which are under way, which were given up, and who computes everything itself.

The blocks of a transfer are pinned until it has ended or the worker was told to write no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv_connector import NullConnector
from octavo.data import events
from octavo.data.scheduler_output import KVLoad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.event_emitter import EventEmitter
    from octavo.core.kv_cache_manager import ComputedBlocks, KVCacheManager
    from octavo.core.kv_connector import KVConnector
    from octavo.data.request import Request


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A transfer under way: with it the first `num_tokens` of `request` are computed."""

    transfer_id: int
    request: Request
    num_tokens: int
    deadline: float


class KVTransfers:
    """The only user of the connector, and of pins in the KV cache. The state of a request is its caller's.

    Ids are never used twice, so a late or double completion finds nothing. timeout_s: how long a transfer may take.
    """

    def __init__(
        self, connector: KVConnector, kv_cache_manager: KVCacheManager, timeout_s: float, emitter: EventEmitter
    ) -> None:
        self._connector = connector
        self._manager = kv_cache_manager
        self._timeout_s = timeout_s
        self._emitter = emitter
        self._loads: dict[int, PendingLoad] = {}
        self._by_request: dict[str, int] = {}
        self._next_id = 0
        self._cancels: list[int] = []
        self._gave_up: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def has_store(self) -> bool:
        """Whether there is a store of KV outside."""
        return not isinstance(self._connector, NullConnector)

    @property
    def has_cancels(self) -> bool:
        """Whether the worker has to be told of transfers that were given up."""
        return bool(self._cancels)

    @property
    def num_records(self) -> int:
        """What is kept of single requests; 0 when nobody is left."""
        return len(self._loads) + len(self._gave_up)

    def requests(self) -> list[Request]:
        """Return the requests that wait for their KV."""
        return [load.request for load in self._loads.values()]

    def num_external_tokens(self, request: Request, computed: ComputedBlocks) -> int:
        """How many tokens behind what is computed here can be fetched, one always left to compute."""
        if not request.reads_prefix_cache or request.request_id in self._gave_up:
            return 0
        found = self._connector.get_num_new_matched_tokens(request, computed.num_tokens)
        return max(min(found, request.num_tokens - 1 - computed.num_tokens), 0)

    def start(self, request: Request, computed: ComputedBlocks, num_external: int, block_ids: list[int]) -> KVLoad:
        """Begin a transfer into a request's blocks, and return the order for the worker."""
        num_tokens = computed.num_tokens + num_external
        load = PendingLoad(self._next_id, request, num_tokens, self._emitter.now + self._timeout_s)
        self._next_id += 1
        self._loads[load.transfer_id] = load
        self._by_request[request.request_id] = load.transfer_id
        self._manager.pin(load.transfer_id, block_ids)
        self._connector.update_state_after_alloc(request, block_ids, num_external)
        self._emitter.emit(events.KVLoadStarted, request.request_id, load.transfer_id, num_external)
        token_ids = request.sequence.token_ids[:num_tokens]
        return KVLoad(load.transfer_id, request.request_id, token_ids, list(block_ids), computed.num_tokens)

    def end(self, transfer_id: int, *, arrived: bool) -> PendingLoad | None:
        """Take in that a transfer ended; None for one that is unknown or over. What failed is not asked for again."""
        load = self._loads.get(transfer_id)
        if load is None:
            self._emitter.emit(events.StaleResultDropped, f"transfer {transfer_id} is over or unknown")
            return None
        self._manager.unpin(transfer_id)
        self._drop(load, "done" if arrived else "failed")
        if not arrived:
            self._gave_up.add(load.request.request_id)
        return load

    def expired(self, now: float) -> list[Request]:
        """Return the requests whose transfers have taken too long: deadlines grow with ids."""
        found = []
        for load in self._loads.values():
            if load.deadline > now:
                break
            found.append(load.request)
        return found

    def cancel(self, request: Request, outcome: str) -> None:
        """Give up a request's transfer; it asks no more. Its blocks stay pinned until the worker has been told."""
        load = self._loads[self._by_request[request.request_id]]
        self._cancels.append(load.transfer_id)
        self._gave_up.add(request.request_id)
        self._drop(load, outcome)

    def _drop(self, load: PendingLoad, outcome: str) -> None:
        del self._loads[load.transfer_id]
        del self._by_request[load.request.request_id]
        self._emitter.emit(events.KVLoadEnded, load.request.request_id, load.transfer_id, outcome)

    def take_cancels(self) -> list[int]:
        """Return the transfers that were given up since the last step."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def end_cancels(self, transfer_ids: Iterable[int]) -> None:
        """Take in that the worker was told: nothing is written into the blocks of these transfers any more."""
        for transfer_id in transfer_ids:
            self._manager.unpin(transfer_id)

    def fail_step(self, loads: Iterable[KVLoad], cancels: Iterable[int]) -> list[Request]:
        """Give up the orders of a step that failed and tell its cancels again; return whose loads these were."""
        self._cancels += cancels
        failed = []
        for order in loads:
            if self._by_request.get(order.request_id) == order.transfer_id:
                request = self._loads[order.transfer_id].request
                self.cancel(request, "failed")
                failed.append(request)
        return failed

    def request_finished(self, request: Request) -> None:
        """Tell the store that a request ended, before its blocks are freed, and keep nothing of it."""
        self._gave_up.discard(request.request_id)
        self._connector.request_finished(request, list(request.sequence.block_table))
