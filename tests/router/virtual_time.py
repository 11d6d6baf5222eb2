"""An event loop with a clock that jumps to the next timer: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """Does not wait, but advances the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None):
        self.now += timeout or 0.0
        return super().select(0)


def run_virtually(work: Callable[[Callable[[], float]], Coroutine[object, object, T]]) -> T:
    """Run a coroutine function on such a loop, and return its result. Its argument returns the time in seconds."""
    selector = VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop.time))
