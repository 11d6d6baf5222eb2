"""Takes the memory of the KV cache from the system before requests would wait for it."""

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
    """A thread that touches memory page by page, from its beginning, with idle priority (on Linux).

    The system provides a page when it is first touched, which costs time: 2 GB took 2.6 s on a virtual machine whose
    host had to find them, and 0.25 s if it had them. The content does not change, even if another thread writes. The
    thread ends by itself, and keeps `data` alive until then; if no thread can be started, pages come when they are
    written.
    """

    def __init__(self, data: Tensor) -> None:
        self._stop = np.zeros(1, np.uint8)  # not a torch tensor: a finalizer may run while torch is watched
        self._thread = threading.Thread(target=_touch, args=(data, self._stop), name="octavo-kv-memory", daemon=True)
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended, even if it has not touched all memory."""
        self._stop[0] = 1
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()  # a finalizer may run in any thread


def _touch(data: Tensor, stop: NDArray[np.uint8]) -> None:
    touch_pages(data.data_ptr(), data.nbytes, stop.ctypes.data)
