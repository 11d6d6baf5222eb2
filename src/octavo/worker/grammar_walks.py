"""Walks of grammars on a thread of their own. A step waits for them a share of its own time: the rest comes later.

What a grammar allows may take 20 ms to compute, which is several steps of a small model.
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

_SHARE = 0.25  # of the time that a step took until its tokens are chosen
_LEAST_S = 0.001
_ALONE_S = 0.005  # where no request of the step could get anything: so long who arrives meanwhile is not heard
_PATIENCE = 10.0  # one that took long the last time begins behind those that come within so many times that


@dataclass(frozen=True, slots=True)
class Walked:
    """What a grammar allows behind a request's newest token and behind each draft, as far as it came.

    masks: bool [vocab] each. They end behind a draft that the grammar forbids, or where an error came.
    """

    masks: Masks
    error: BaseException | None


@dataclass(slots=True)
class Walk:
    """A request's walk from the tokens that were known before it.

    num_tokens: that are known to it. drafts: behind these. seconds: how long it took.
    """

    num_tokens: int
    drafts: list[int]
    result: Future[Walked] = field(default_factory=Future)
    seconds: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether its result can be had."""
        return self.result.done()

    def wait(self) -> None:
        """Wait until it is over, however long that takes; one that has not begun never does."""
        if not self.result.cancel():
            wait([self.result])


class GrammarWalks:
    """Does walks one after the other; those that are likely short begin first."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar-walk")
        self._waiting: PriorityQueue[tuple[float, int, Walk, Callable[[], Walked]]] = PriorityQueue()
        self._numbers = itertools.count()  # decides between equals

    def add(self, walk: Walk, run: Callable[[], Walked], last_s: float) -> None:
        """Let a walk wait for `begin`; last_s: how long the request's last one took."""
        self._waiting.put((time.monotonic() + _PATIENCE * last_s, next(self._numbers), walk, run))

    def begin(self) -> None:
        """Do what waits: a thread is woken once for all walks of a step, which costs as much as a short one."""
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
        except BaseException as error:  # noqa: BLE001 - raised again by the result
            walk.result.set_exception(error)
            return
        walk.seconds = time.monotonic() - start
        walk.result.set_result(walked)


def wait_for(walks: Sequence[Walk], step_s: float, *, is_all: bool) -> None:
    """Wait until walks are over, but not for long in comparison with what the step took so far.

    is_all: without one of them no request of the step gets anything.
    """
    pending = [walk.result for walk in walks if not walk.is_ready]
    if not pending:
        return
    done, _ = wait(pending, max(_LEAST_S, _SHARE * step_s))
    if is_all and not done and len(pending) == len(walks):
        wait(pending, _ALONE_S, FIRST_COMPLETED)
