"""`python -m octavo.cli.replica serve ...`: octavo as a child of `octavo serve --replicas N`, which it ends with."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

_LEAVE_S = 10.0


def _end_with_parent() -> None:
    """Leave when standard input ends: the process at its other end is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LEAVE_S)
    os._exit(2)


if __name__ == "__main__":
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has no keys yet that it could read anew
    from octavo.cli import main

    threading.Thread(target=_end_with_parent, name="octavo-parent-watch", daemon=True).start()
    main()
