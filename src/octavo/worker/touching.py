"""Memory of the KV cache is taken from the system before requests would wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from octavo.kernels.machine import touch_pages

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 8 << 20  # between two looks at whether to go on


class Touching:
    """A thread that touches memory page by page, from its beginning, in time that nobody else has use for.

    The system gives a page when it is touched first, which costs whoever does it: up to 2.6 s for a gigabyte on a
    virtual machine whose host has to find the memory, 0.1 s where it is there. Content stays as it is, whoever writes
    meanwhile. The thread ends by itself; it holds `data` until then.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-kv-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended, whether or not it was done."""
        self._is_stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Return when all is touched."""
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not on Linux, or not allowed
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        begin, num_bytes = self._data.data_ptr(), self._data.nbytes
        for offset in range(0, num_bytes, _CHUNK_BYTES):
            if self._is_stopped.is_set():
                return
            touch_pages(begin + offset, min(_CHUNK_BYTES, num_bytes - offset))
