"""A child of `octavo serve --replicas N` that exits with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

_EXIT_S = 6.0


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_EXIT_S)
    os._exit(2)


if __name__ == "__main__":
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from octavo.cli import main

    threading.Thread(target=_end_with_parent, name="octavo-parent-watch", daemon=True).start()
    main()
