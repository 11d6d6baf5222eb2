"""Ranks as threads of the test's process. They start at once, and fail a test with their own traceback."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from octavo.ranks import channel, follower, measured_rank, messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence


class RankThread:
    """Looks like the process of a rank."""

    def __init__(self, end: socket.socket, memory: Sequence[int]) -> None:
        self._end, self._memory = end.dup(), [*map(os.dup, memory)]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._end, contextlib.suppress(channel.ClosedError):
            launch = messages.decode_to_rank(channel.receive(self._end))
            memory, *kv_memory = self._memory
            if isinstance(launch, messages.Measure):
                measured_rank.measure(self._end, msgspec.structs.replace(launch, memory=memory))
            if isinstance(launch, messages.Launch):
                kv_memory = kv_memory[0] if kv_memory else None
                follower.serve(self._end, msgspec.structs.replace(launch, memory=memory, kv_memory=kv_memory))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the thread's end, which follows from the closed socket."""
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        """Do nothing: closing the socket ends the thread."""
