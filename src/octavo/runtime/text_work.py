"""Threads of their own for what texts cost: parsing, templates, token ids and back, the spelling of answers.

What one request's texts cost no other request waits for, unless it has texts of that size, too.
"""

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
# Sizes of texts in characters. Work waits in line for work of its own lane alone: eight texts of 30,000 characters take
# some 150 ms, a short request's whole time is 4. The threads still share the interpreter and the cores.
# Reading a few words takes a fifth of a millisecond; a thread that is asked for it waits for the interpreter several
# times as long while others work, and so does the event loop behind it.
_AT_ONCE_CHARS = 1 << 9
_LANES = {"short": 1 << 11, "medium": 1 << 15, "long": 1 << 19, "longest": math.inf}
_LARGE = 256  # entries, each of which takes a few microseconds to spell
_BYTES_PER_ENTRY = 128  # of JSON that is read
_KINDS = "text", "count"  # of threads: for what is to be answered, and for what is only counted
_LONGEST_S = 30.0  # that one piece of work may take; 8 MB of text take a third of it


class AbandonedError(Exception):
    """Nobody waits for this work any more."""


class _Work:
    """Some work under way: whether anybody waits for it, and how many tokens were read so far."""

    def __init__(self) -> None:
        self.is_abandoned = False
        self.num_tokens = 0
        self._end = math.inf

    def begin(self) -> None:
        """Count its time from now on; raise where nobody waits for it any more."""
        self._end = time.monotonic() + _LONGEST_S
        self.check()

    def check(self) -> None:
        """Raise where it shall not go on."""
        if self.is_abandoned:
            raise AbandonedError
        if time.monotonic() > self._end:
            raise RequestError(f"reading this request took longer than {_LONGEST_S:g} s; send less at once")


_local = threading.local()  # `work`: what this thread does


def progress(num_tokens: int = 0) -> None:
    """Tell that so many more tokens were read by the work that this thread does, where it does any.

    Raises where that shall not go on, as nobody waits for it or it took too long: whatever takes long calls it often.
    """
    work: _Work | None = getattr(_local, "work", None)
    if work is not None:
        work.num_tokens += num_tokens
        work.check()


class TextWork:
    """Does work beside the event loop, in four lanes by its size, each with one thread and fair turns of tenants.

    A few words that are to be answered are read at once, on the event loop itself. Texts that are only counted have
    threads of their own, and one of each lane is under way at a time, until the event loop has heard of it: whatever
    else that has to do waits for no more of them.
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
        """Return what some work returns.

        num_chars: how large the text is that it is about. deadline: on the clock of the event loop. on_read hears in
        the end, however that comes, how many tokens were read (`progress`). Work whose reader is cancelled meanwhile
        does not begin, or ends at its next `progress`. is_count: no answer of the model waits for it. Raises
        `DeadlineError`, and what the work raises.
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
        """Take nothing new; the threads end when they have done what waits, as somebody may wait for it."""
        for executor in self._executors:
            executor.shutdown(wait=False)


def _run(under_way: _Work, work: Callable[[], T]) -> T:
    _local.work = under_way
    try:
        under_way.begin()
        return work()
    finally:
        _local.work = None


async def beside(
    text: TextWork,
    num_entries: int,
    work: Callable[[], T],
    *,
    tenant: str,
    deadline: float = math.inf,
    is_count: bool = False,
) -> T:
    """Do some work, in a thread where it is large: every other request waits for what is done on the event loop."""
    if num_entries <= _LARGE:
        return work()
    num_chars = num_entries * _BYTES_PER_ENTRY
    return await text.do(work, num_chars=num_chars, tenant=tenant, deadline=deadline, is_count=is_count)


def entries_of_bytes(num_bytes: int) -> int:
    """Return how many entries a text counts as."""
    return num_bytes // _BYTES_PER_ENTRY
