"""What Python's garbage collector need not look at."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def permanent_generation() -> Iterator[None]:
    """Make what lives as long as its process: libraries, a model, an application.

    The collector neither runs meanwhile nor looks at all that there is again. So a full collection, in which requests
    would wait, is a matter of what requests made, and comes when there is much of that and not of all together. For a
    process of octavo's own: the collector is that of the whole process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
        gc.collect()  # which counts what it looked at, for when to come again
    finally:
        if was_enabled:
            gc.enable()
