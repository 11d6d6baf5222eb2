"""Threads for work on texts, such as tokenizing. A request waits only for texts of similar size."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import DeadlineError, RequestError
from octavo.outputs import ErrorCode
from octavo.runtime.gate import Gate
from octavo.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# Sizes in characters. Each size class has a separate queue.
_AT_ONCE_CHARS = 1 << 9
_LANES = {"short": 1 << 11, "medium": 1 << 15, "long": 1 << 19, "longest": math.inf}
_LARGE = 256  # entries of JSON
_BYTES_PER_ENTRY = 128
_KINDS = "text", "count"  # answers, token counts
_LONGEST_S = 30.0


class AbandonedError(Exception):
    """The caller was cancelled or timed out."""


class _Work:
    def __init__(self) -> None:
        self.is_abandoned = False
        self.num_tokens = 0
        self._end = math.inf

    def begin(self) -> None:
        self._end = time.monotonic() + _LONGEST_S
        self.check()

    def check(self) -> None:
        if self.is_abandoned:
            raise AbandonedError
        if time.monotonic() > self._end:
            raise RequestError(f"reading this request took longer than {_LONGEST_S:g} s; send a shorter request")


_local = threading.local()  # `work`: this thread's `_Work`


def progress(num_tokens: int = 0) -> None:
    """Count tokens that this thread's text work has read. Outside of text work, do nothing.

    Long work must call this often, because only this call can end it. Raises `AbandonedError` if the caller no longer
    waits, and `RequestError` if the work takes too long.
    """
    work: _Work | None = getattr(_local, "work", None)
    if work is not None:
        work.num_tokens += num_tokens
        work.check()


class TextWork:
    """One thread for each size class of texts ("lane"). Tenants use a thread in turns.

    Tiny texts run on the event loop. Token counts have separate threads. A lane starts the next count after the event
    loop got the previous result.
    """

    def __init__(self) -> None:
        self._executors: list[ThreadPoolExecutor] = []
        self._turns, self._count_turns = ({name: self._one_thread(kind, name) for name in _LANES} for kind in _KINDS)
        self._gates = {name: Gate() for name in _LANES}

    def _one_thread(self, kind: str, lane: str) -> Turns:
        self._executors.append(ThreadPoolExecutor(1, thread_name_prefix=f"octavo-{kind}-{lane}"))
        return Turns(self._executors[-1])

    async def do(
        self,
        work: Callable[[], T],
        *,
        num_chars: int,
        tenant: str = "",
        deadline: float = math.inf,
        on_read: Callable[[int], None] | None = None,
        is_count: bool = False,
    ) -> T:
        """Run `work` and return its result. Raises exceptions of `work`, and `DeadlineError`.

        deadline: time of the event loop's clock. on_read: called with the number of tokens read, even after an error.
        If the caller is cancelled, the work stops at its next `progress`.
        """
        under_way = _Work()
        if num_chars <= _AT_ONCE_CHARS and not is_count:
            try:
                return _run(under_way, work)
            finally:
                if on_read is not None:
                    on_read(under_way.num_tokens)
        lane = next(name for name, most in _LANES.items() if num_chars <= most)
        turns = self._count_turns[lane] if is_count else self._turns[lane]
        gate = self._gates[lane].turn(tenant) if is_count else contextlib.nullcontext()
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline), gate:
                return await asyncio.wrap_future(turns.submit(tenant, lambda: _run(under_way, work)))
        except TimeoutError:
            raise DeadlineError(ErrorCode.DEADLINE_PASSED.text) from None
        finally:
            under_way.is_abandoned = True
            if on_read is not None:
                on_read(under_way.num_tokens)

    def shutdown(self) -> None:
        """Accept no new work. Queued work still runs."""
        for executor in self._executors:
            executor.shutdown(wait=False)


def _run(under_way: _Work, work: Callable[[], T]) -> T:
    _local.work = under_way
    try:
        under_way.begin()
        return work()
    finally:
        _local.work = None


async def run_text_work(
    text: TextWork,
    num_entries: int,
    work: Callable[[], T],
    *,
    tenant: str,
    deadline: float = math.inf,
    is_count: bool = False,
) -> T:
    """Run `work` on the event loop, or on a thread if its JSON has many entries."""
    if num_entries <= _LARGE:
        return work()
    num_chars = num_entries * _BYTES_PER_ENTRY
    return await text.do(work, num_chars=num_chars, tenant=tenant, deadline=deadline, is_count=is_count)


def entries_of_bytes(num_bytes: int) -> int:
    """Estimate the number of entries of a JSON text."""
    return num_bytes // _BYTES_PER_ENTRY
