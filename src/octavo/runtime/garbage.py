"""Excludes long-lived objects from garbage collection."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def permanent_generation() -> Iterator[None]:
    """Disable garbage collection during the block, then freeze all objects. Only for octavo's own processes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
        gc.collect()  # resets the counter that schedules full collections
    finally:
        if was_enabled:
            gc.enable()
