"""Store failures become misses."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from octavo.data.kv_store_figures import KVStoreFigures
from octavo.kv_transfer.interface import StoreError, StoreStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo.kv_transfer.interface import KVStore

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
HANGS_AFTER_S = 5.0
CHECK_S = 5.0
ResultT = TypeVar("ResultT")


class GuardedStore:
    """A `KVStore` over a store that may fail, hang or not be open yet. Raises nothing.

    After a failure, no call is made during a pause. Then one call tests the store. Each further failure doubles the
    pause. While a call hangs, no other call is made.

    open_store: Called until it succeeds. may_wait: True if calls may wait for other engines. Then no call counts as
    hanging. keeps_parts: True if the store also keeps blocks with only the first KV group.
    """

    def __init__(
        self,
        name: str,
        block_bytes: int,
        open_store: Callable[[], KVStore],
        *,
        clock: Callable[[], float] = time.monotonic,
        may_wait: bool = False,
        keeps_parts: bool = True,
    ) -> None:
        self.keeps_parts = keeps_parts
        self.name = name
        self.block_bytes = block_bytes
        self._open_store = open_store
        self._clock = clock
        self._may_wait = may_wait
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._store: KVStore | None = None
        self._calls: dict[int, float] = {}
        self._called_at = clock()
        self._is_over = threading.Event()
        self._num_calls = 0
        self._error = ""
        self._num_failures = 0
        self._num_evicted = self._num_evicted_reported = 0
        self.figures = KVStoreFigures()
        self._pause_s = 0.0
        self._resumes_at = 0.0
        self._is_closed = False

    @classmethod
    def of(cls, store: KVStore, *, may_wait: bool = False, keeps_parts: bool = True) -> GuardedStore:
        """Guard an open store."""
        guard = cls(store.name, store.block_bytes, lambda: store, may_wait=may_wait, keeps_parts=keeps_parts)
        guard._store = store
        guard.figures.is_usable = 1
        return guard

    @property
    def is_usable(self) -> bool:
        """True if calls are allowed now: not closed, paused or hanging."""
        now = self._clock()
        with self._lock:
            hangs = self._hangs(now)
            self._note_usable(hangs=hangs)
            return not self._is_closed and now >= self._resumes_at and not hangs

    def _note_usable(self, *, hangs: bool = False) -> None:
        """Needs the lock."""
        self.figures.is_usable = int(self._store is not None and not (self._error or self._is_closed or hangs))

    def _hangs(self, now: float) -> bool:
        return not self._may_wait and any(now - start > HANGS_AFTER_S for start in self._calls.values())

    def check_when_idle(self, period_s: float = CHECK_S) -> None:
        """Call an idle store periodically, so that `figures.is_usable` stays correct."""
        arguments = weakref.ref(self), self._is_over, period_s
        threading.Thread(target=_check, args=arguments, name=f"octavo-kv-check-{self.name}", daemon=True).start()

    def check(self, period_s: float) -> None:
        """Look up no keys, if idle for period_s."""
        if self._clock() - self._called_at >= period_s:
            self._ask(lambda store: store.num_matched([]), 0)

    def open(self) -> None:
        """Open the store."""
        self._ask(lambda _: None, None)

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """See `KVStore`."""
        return min(self._ask(lambda store: store.num_matched(keys), 0), len(keys))

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the missing keys, or no keys while the store is unusable."""
        store = self._store
        if store is None or not self.is_usable:
            return set()
        try:
            return store.lacks(keys)
        except Exception as error:  # noqa: BLE001 - see `_ask`
            self._failed(error)
            return set()

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        num_loaded = min(self._ask(lambda store: store.load(keys, blocks), 0), len(keys))
        self._note_stats()
        return num_loaded

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        count = min(self._ask(lambda store: store.save(keys, blocks), 0), len(keys))
        self._note_stats()
        return count

    def take_evicted(self) -> int:
        """Return the blocks evicted since the last call, as of the last load or save."""
        with self._lock:
            count, self._num_evicted_reported = self._num_evicted - self._num_evicted_reported, self._num_evicted
        return count

    def _note_stats(self) -> None:
        stats, figures = self.stats(), self.figures
        with self._lock:
            figures.num_blocks, figures.num_bytes = stats.num_blocks, stats.num_bytes
            figures.num_corrupt, self._num_evicted = stats.num_corrupt, max(self._num_evicted, stats.num_evicted)
            figures.num_errors = max(figures.num_errors, stats.num_errors)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `KVStore`."""
        self._ask(lambda store: store.forget(keys), None)

    def stats(self) -> StoreStats:
        """See `KVStore`. Includes the guard's failures."""
        store = self._store
        try:
            stats = StoreStats(0, 0, None) if store is None else store.stats()
        except Exception as error:  # noqa: BLE001 - see `_ask`
            self._failed(error)
            stats = StoreStats(0, 0, None)
        now = self._clock()
        with self._lock:
            hangs, error_text = self._hangs(now), self._error
        if hangs:
            error_text = f"a call has taken more than {HANGS_AFTER_S:g} s"
        return StoreStats(
            stats.num_blocks,
            stats.num_bytes,
            stats.max_bytes,
            stats.num_evicted,
            stats.num_corrupt,
            max(stats.num_errors, self._num_failures),
            error_text or stats.error,
        )

    def close(self) -> None:
        """Close the store."""
        self._is_over.set()
        with self._lock:
            self._is_closed = True
            self._note_usable()
        if self._store is not None:
            try:
                self._store.close()
            except Exception as error:  # noqa: BLE001 - see `_ask`
                self._failed(error)

    def _ask(self, ask: Callable[[KVStore], ResultT], otherwise: ResultT) -> ResultT:
        """Return `otherwise` if no call may be made or the call fails."""
        if not self._may_ask():
            return otherwise
        try:
            with self._call():
                result = ask(self._opened())
        except Exception as error:  # noqa: BLE001 - a faulty store must not fail requests
            self._failed(error)
            return otherwise
        self._succeeded()
        return result

    def _may_ask(self) -> bool:
        now = self._clock()
        with self._lock:
            if self._is_closed or now < self._resumes_at or self._hangs(now):
                return False
            if self._pause_s:
                self._resumes_at = now + self._pause_s
            return True

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = self._called_at = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def _opened(self) -> KVStore:
        with self._opening:
            if self._store is None:
                store = self._open_store()
                with self._lock:
                    is_late = self._is_closed
                    self._store = None if is_late else store
                if is_late:
                    store.close()
            if self._store is None:
                raise StoreError("it is closed")
            return self._store

    def _failed(self, error: Exception) -> None:
        with self._lock:
            is_new = not self._error
            self._error = str(error) or type(error).__name__
            self._num_failures += 1
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._resumes_at = self._clock() + self._pause_s
            self.figures.num_errors = max(self.figures.num_errors, self._num_failures)
            self._note_usable()
        if is_new and isinstance(error, StoreError):
            logger.warning("KV store %s is not used for a while, then retried: %s", self.name, error)
        elif is_new:
            logger.error("KV store %s failed; it is not used for a while, then retried", self.name, exc_info=error)

    def _succeeded(self) -> None:
        with self._lock:
            was_failing = bool(self._error)
            self._error, self._pause_s, self._resumes_at = "", 0.0, 0.0
            self._note_usable()
        if was_failing:
            logger.info("KV store %s works again", self.name)


def _check(guard: weakref.ref[GuardedStore], is_over: threading.Event, period_s: float) -> None:
    while not is_over.wait(period_s):
        store = guard()
        if store is None:
            return
        store.check(period_s)
        del store
