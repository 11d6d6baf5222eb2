"""Touches the KV cache's memory early."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np

from octavo.kernels.machine import touch_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Prefault:
    """A thread that touches each page of memory at idle priority (Linux), without changes."""

    def __init__(self, data: Tensor) -> None:
        self._stop = np.zeros(1, np.uint8)  # not a tensor, because a finalizer may run while a pass is recorded
        self._thread = threading.Thread(target=_touch, args=(data, self._stop), name="octavo-kv-memory", daemon=True)
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop[0] = 1
        # A finalizer may run in the thread itself.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _touch(data: Tensor, stop: NDArray[np.uint8]) -> None:
    touch_pages(data.data_ptr(), data.nbytes, stop.ctypes.data)
