"""An event loop whose clock jumps to whatever is waited for: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """Does not wait: the clock of its loop goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None):
        self.now += timeout or 0.0
        return super().select(0)


def run_virtually(work: Callable[[Callable[[], float]], Coroutine[object, object, T]]) -> T:
    """Run a coroutine function on such a loop; its argument returns the time."""
    selector = VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop.time))
