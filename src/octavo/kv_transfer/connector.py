"""Scheduler-side KVConnector implementation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from octavo.kv_transfer.direct import NoConnector
from octavo.kv_transfer.group_parts import find_blocks, num_usable
from octavo.kv_transfer.guard import HANGS_AFTER_S
from octavo.kv_transfer.stored_states import find_state, keys_of_state
from octavo.runtime.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer
    from octavo.kv_transfer.direct import MooncakeConnector
    from octavo.kv_transfer.tiers import TieredStore

_LOOKUP_THREADS = 2
_EXPECTED_S = 1.0  # longest wait for a further block
_MOST_STATES = 128  # states that a lookup looks for
_RETRY_S, _MAX_RETRY_S = 0.005, 0.04  # pauses between lookups double up to the second value


@dataclass(slots=True)
class _Lookup:
    """A lookup of a request's blocks `first` to `num_blocks` - 1.

    num_expected: Leading blocks that another engine saves. until: Monotonic time at which the wait for them ends.
    found: The largest number of blocks and pieces of states that were present.
    """

    first: int
    num_blocks: int
    is_direct: bool = False
    num_expected: int = 0
    end: int | None = None
    is_wanted: bool = True
    until: float = 0.0
    found: int = 0
    pause_s: float = _RETRY_S
    again_at: float | None = None

    def take(self, count: int, now: float, num_present: int | None = None, *, is_final: bool = True) -> None:
        """Record found blocks.

        num_present: Blocks and pieces of states that the store has, by default `count`. is_final: False if a lookup
        after `until` may find more.
        """
        found = self.first + count
        present = self.first + (count if num_present is None else num_present)
        if present > self.found:
            self.found, self.until = present, now + _EXPECTED_S
        if found >= self.num_expected or (is_final and now >= self.until) or not self.is_wanted:
            self.end = found
        else:
            self.again_at = now + self.pause_s
            self.pause_s = min(2 * self.pause_s, _MAX_RETRY_S)


class StoreConnector:
    """A `core.kv_connector.KVConnector` that looks up blocks in a store.

    A result is kept until the request ends, needs other blocks, or ends a direct or incomplete load. After an
    incomplete load, only blocks before the first missing block are looked up. Blocks that another engine saves are
    looked up again until all are found or no more arrive.

    on_answer: Called on another thread after a lookup. direct: Result of `create_connector`, also a tier of the store.
    kinds: Kinds of the KV groups with blocks of tokens, without the first. The store may lack these groups for blocks
    that no row reads. num_state_pieces: Pieces of a recurrent state (`octavo.kv_transfer.stored_states`), or 0.
    """

    def __init__(
        self,
        store: TieredStore,
        block_size: int,
        on_answer: Callable[[], None] = lambda: None,
        direct: MooncakeConnector | None = None,
        kinds: Sequence[KVGroupKind] = (),
        num_state_pieces: int = 0,
    ) -> None:
        self.name = store.name
        self._kinds = kinds
        self._num_pieces = num_state_pieces
        self._store = store
        self._block_size = block_size
        self._on_answer = on_answer
        self._direct = direct or NoConnector()
        self._lookups: dict[str, _Lookup] = {}
        self._missing: dict[str, bytes] = {}  # by request: the first key that a load did not find
        self._threads = DaemonThreads(_LOOKUP_THREADS, "octavo-kv-lookup", HANGS_AFTER_S)
        self._threads.submit(store.open)

    @property
    def num_lookups(self) -> int:
        """Number of requests with lookup state."""
        return len(self._lookups.keys() | self._missing.keys())

    def request_added(self, request: Request) -> None:
        """See `KVConnector`."""
        self._direct.request_added(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many further tokens the store has, or None while the lookup runs."""
        first, num_blocks = num_computed_tokens // self._block_size, len(request.block_hashes)
        lookup = self._lookups.get(request.request_id)
        if lookup is None or first < lookup.first or num_blocks != lookup.num_blocks:
            lookup = self._ask(request, first)
        elif lookup.again_at is not None and time.monotonic() >= lookup.again_at:
            self._submit(lookup, request)
        end = lookup.end
        return None if end is None else max(end - first, 0) * self._block_size

    def _ask(self, request: Request, first: int) -> _Lookup:
        self._drop(request.request_id)
        lookup = _Lookup(first, len(request.block_hashes), found=first)
        self._lookups[request.request_id] = lookup
        if not self._store.is_usable:
            lookup.end = first
            return lookup
        lookup.is_direct = self._direct.expect(request)
        if request.expects_kv and not lookup.is_direct:
            lookup.num_expected = (request.num_prompt_tokens - (self._num_pieces > 0)) // self._block_size
            lookup.until = time.monotonic() + _EXPECTED_S
        self._submit(lookup, request)
        return lookup

    def _submit(self, lookup: _Lookup, request: Request) -> None:
        lookup.again_at = None
        keys, num_tokens = request.block_hashes[lookup.first :], request.num_tokens
        missing = self._missing.get(request.request_id)
        if missing is not None and missing in keys:
            keys = keys[: keys.index(missing)]
        self._threads.submit(partial(self._look_up, lookup, keys, num_tokens))

    def _look_up(self, lookup: _Lookup, keys: list[bytes], num_tokens: int) -> None:
        is_final = not self._num_pieces or time.monotonic() >= lookup.until
        count = num_present = 0
        try:
            if lookup.is_wanted:
                where = lookup.first, num_tokens, self._block_size, self._kinds
                is_whole = find_blocks(self._store, keys, *where)
                count, num_present = num_usable(is_whole, *where), len(is_whole)
                if self._num_pieces:
                    is_complete = lookup.first + num_present >= lookup.num_expected
                    most_lookups = _MOST_STATES if is_final else int(is_complete)
                    state = find_state(
                        self._store, keys, is_whole, *where, num_pieces=self._num_pieces, most_lookups=most_lookups
                    )
                    count = state.num_usable
                    num_present += 0 if is_final else state.num_pieces
        finally:
            lookup.take(count, time.monotonic(), num_present, is_final=is_final)
            self._on_answer()

    def _drop(self, request_id: str) -> None:
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.is_wanted = False
            self._direct.forget_expected(request_id)

    def lookup_given_up(self, request: Request) -> None:
        """Cancel the request's lookup."""
        self._drop(request.request_id)

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def keys_to_save(self, keys: Sequence[bytes], *, only_first_group: bool = False) -> set[bytes]:
        """Return the keys that any store lacks."""
        return self._store.lacks(keys, only_first_group=only_first_group)

    def states_to_save(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `KVConnector`. Any store may lack the state."""
        return {key for key in keys if self._store.lacks(keys_of_state(key, self._num_pieces))}

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """See `KVConnector`."""
        self._direct.transfer_ordered(transfer)

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Drop the lookup's result after an incomplete or direct load."""
        self._direct.transfer_ended(transfer)
        name, num_ordered = transfer.request_id, len(transfer.keys)
        if name is None:
            return
        self._missing.pop(name, None)
        if num_blocks is not None and num_blocks < num_ordered:
            self._missing[name] = transfer.keys[num_blocks]
        lookup = self._lookups.get(name)
        if num_blocks != num_ordered or (lookup and lookup.is_direct):
            self._drop(name)

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """See `KVConnector`."""
        del block_ids
        self._direct.request_finished(request)
        self._missing.pop(request.request_id, None)
        self._drop(request.request_id)

    def close(self) -> None:
        """Accept no further lookups. Does not wait."""
        self._threads.close(0.0)
