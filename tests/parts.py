"""Selects one part of many tests, and limits the time of a run: CI runs an eighth of the slow tests a day."""

from __future__ import annotations

import random
import zlib
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


def read_part(text: str) -> tuple[int, int]:
    """Return (index, number of parts) of `3/8`. Raises ValueError unless 0 <= index < number."""
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ValueError(f"--part takes INDEX/NUMBER with INDEX below NUMBER, as in 3/8, got {text!r}")
    return int(index), int(number)


def is_in_part(name: str, index: int, number: int) -> bool:
    """Return whether a test belongs to a part. Each test belongs to exactly one, whatever other tests there are."""
    return zlib.crc32(name.encode()) % number == index


def in_order_of(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the tests with their files in an order drawn by the seed.

    So a time limit skips different tests each time. Tests of a file stay together and share fixtures.
    """
    files = [list(group) for _, group in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    random.Random(seed).shuffle(files)
    return [item for file in files for item in file]


class TimeLimit:
    """True once `limit_s` seconds have passed since the object was made. clock: returns seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._start_s = clock()

    @property
    def has_passed(self) -> bool:
        return self._clock() - self._start_s > self.limit_s
