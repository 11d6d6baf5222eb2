"""Advances grammars over new tokens ("walks") on a separate thread.

A mask may take 20 ms to compute, so a step waits only for a share of the time that it has taken so far.
If a walk is late, a later step chooses the token.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Masks = list["NDArray[np.bool_]"]
    import numpy as np

_SHARE = 0.25  # of the step's time so far
_LEAST_S = 0.001
_ALONE_S = 0.005  # longer wait if no request could get a token
_PATIENCE = 10.0  # shorter walks may overtake for this multiple of the last walk's duration


@dataclass(frozen=True, slots=True)
class Walked:
    """Masks, bool [vocab]: after the newest token, and after each draft before a forbidden draft or an error."""

    masks: Masks
    error: BaseException | None


@dataclass(slots=True)
class Walk:
    """A walk of a request's grammar. drafts: tokens after `num_tokens` known ones."""

    num_tokens: int
    drafts: list[int]
    result: Future[Walked] = field(default_factory=Future)
    seconds: float = 0.0

    @property
    def is_ready(self) -> bool:
        """True once the walk has ended."""
        return self.result.done()

    def wait(self) -> None:
        """Cancel the walk, or wait for its end if it has begun."""
        if not self.result.cancel():
            wait([self.result])


class GrammarWalks:
    """Runs walks, short ones first."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar-walk")
        self._waiting: PriorityQueue[tuple[float, int, Walk, Callable[[], Walked]]] = PriorityQueue()
        self._numbers = itertools.count()  # for ties

    def add(self, walk: Walk, run: Callable[[], Walked], last_s: float) -> None:
        """Queue a walk."""
        self._waiting.put((time.monotonic() + _PATIENCE * last_s, next(self._numbers), walk, run))

    def begin(self) -> None:
        """Run queued walks on the thread."""
        if not self._waiting.empty():
            self._executor.submit(self._run_all)

    def _run_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                _, _, walk, run = self._waiting.get_nowait()
                self._run(walk, run)

    @staticmethod
    def _run(walk: Walk, run: Callable[[], Walked]) -> None:
        if not walk.result.set_running_or_notify_cancel():
            return
        start = time.monotonic()
        try:
            walked = run()
        except BaseException as error:  # noqa: BLE001 - the result raises it
            walk.result.set_exception(error)
            return
        walk.seconds = time.monotonic() - start
        walk.result.set_result(walked)


def wait_for(walks: Sequence[Walk], step_s: float, *, is_all: bool) -> None:
    """Wait for a share of `step_s`. If all requests need walks (`is_all`) and none is ready, wait longer for one."""
    pending = [walk.result for walk in walks if not walk.is_ready]
    if not pending:
        return
    done, _ = wait(pending, max(_LEAST_S, _SHARE * step_s))
    if is_all and not done and len(pending) == len(walks):
        wait(pending, _ALONE_S, FIRST_COMPLETED)
