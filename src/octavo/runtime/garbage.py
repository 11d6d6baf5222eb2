"""Excludes long-lived objects from garbage collection."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# Net new objects until a collection of the youngest objects; collections of a generation until one of the next.
_RARE = 5_000, 10, 20


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely during the block.

    A full collection visits all objects, which takes half a second with thousands of streams. With Python's thresholds,
    a process that gets more and more streams makes one whenever it has a quarter more objects. In the block it gets a
    million objects more before the next one. Use this only if most garbage has no reference cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
