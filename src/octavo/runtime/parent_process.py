"""Handles the parent's death."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def wake_when_parent_dies() -> None:
    """Have Linux send SIGCONT when the parent dies, because a suspended process cannot exit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
