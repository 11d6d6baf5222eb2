"""Threads of their own for what texts cost: parsing, templates, token ids and back, the spelling of answers.

What one request's texts cost no other request waits for, unless it has texts of that size, too.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import DeadlineError, RequestError
from octavo.outputs import DEADLINE_PASSED
from octavo.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# Sizes of texts in characters. Work waits in line for work of its own lane alone: eight texts of 30,000 characters take
# some 150 ms, a short request's whole time is 4. The threads still share the interpreter and the cores.
_LANES = {"short": 1 << 11, "medium": 1 << 15, "long": 1 << 19, "longest": math.inf}
_LARGE = 256  # entries, each of which takes a few microseconds to spell
_BYTES_PER_ENTRY = 128  # of JSON that is read
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
    """Does work beside the event loop, in four lanes by its size, each with one thread and fair turns of tenants."""

    def __init__(self) -> None:
        self._executors = {name: ThreadPoolExecutor(1, thread_name_prefix=f"octavo-text-{name}") for name in _LANES}
        self._turns = {name: Turns(executor) for name, executor in self._executors.items()}

    async def do(
        self,
        work: Callable[[], T],
        *,
        num_chars: int,
        tenant: str = "",
        deadline: float = math.inf,
        on_read: Callable[[int], None] | None = None,
    ) -> T:
        """Return what some work returns.

        num_chars: how large the text is that it is about. deadline: on the clock of the event loop. on_read hears in
        the end, however that comes, how many tokens were read (`progress`). Work whose reader is cancelled meanwhile
        does not begin, or ends at its next `progress`. Raises `DeadlineError`, and what the work raises.
        """
        under_way = _Work()
        lane = next(name for name, most in _LANES.items() if num_chars <= most)
        future = self._turns[lane].submit(tenant, lambda: _run(under_way, work))
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlineError(DEADLINE_PASSED) from None
        finally:
            under_way.is_abandoned = True
            if on_read is not None:
                on_read(under_way.num_tokens)

    def shutdown(self) -> None:
        """Take nothing new; the threads end when they have done what waits, as somebody may wait for it."""
        for executor in self._executors.values():
            executor.shutdown(wait=False)


def _run(under_way: _Work, work: Callable[[], T]) -> T:
    _local.work = under_way
    try:
        under_way.begin()
        return work()
    finally:
        _local.work = None


async def beside(
    text: TextWork, num_entries: int, work: Callable[[], T], *, tenant: str, deadline: float = math.inf
) -> T:
    """Do some work, in a thread where it is large: every other request waits for what is done on the event loop."""
    if num_entries <= _LARGE:
        return work()
    return await text.do(work, num_chars=num_entries * _BYTES_PER_ENTRY, tenant=tenant, deadline=deadline)


def entries_of_bytes(num_bytes: int) -> int:
    """Return how many entries a text counts as."""
    return num_bytes // _BYTES_PER_ENTRY
