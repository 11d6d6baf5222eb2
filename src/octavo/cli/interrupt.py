"""Handles Ctrl-C."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


class Interrupt:
    """Sets `pressed` at the first Ctrl-C. The second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
