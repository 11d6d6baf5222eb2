"""The main module of the process of a rank other than rank 0."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

from octavo.runtime.parent_process import wake_when_parent_dies
from octavo.runtime.process_memory import returning_free_memory


def main() -> None:
    """Run a rank. The first argument is the descriptor of its end of the socket pair."""
    # Only the engine handles these signals, which may reach the whole process group.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    wake_when_parent_dies()
    end = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=[end.fileno()], name="octavo-parent-watch", daemon=True).start()
    from octavo.ranks.follower import run  # noqa: PLC0415 - imports torch, which takes seconds

    run(end)


def _end_with_parent(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(2)


if __name__ == "__main__":
    with returning_free_memory():
        main()
