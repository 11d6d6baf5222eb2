"""Engines that are loaded side by side and work in turns, so that what the machine gives is nearly the same for each.

A neighbour may take half of a shared machine's memory bandwidth for seconds or minutes. Rounds of one engine after the
other compare different moments then; a turn lasts seconds, and tells what the machine gave at its start.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comparison.measuring import RunError, Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from comparison.engines import Engine
    from comparison.measuring import Setting


_LOOK_S, _LONGEST_SPIN_S = 0.3, 10.0
_QUIET = 0.1  # of a core: the system counts CPU time in hundredths of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One workload at one precision, with or without the prefix cache."""

    precision: str
    letter: str
    caching: bool = False

    @property
    def workload(self) -> str:
        """As tables name it."""
        return self.letter if self.letter != "D" else f"D {'on' if self.caching else 'off'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn gave.

    figures  {engine: tokens/s or seconds}
    limits   of the machine, just before
    waiting  CPU seconds that the engines used while it was another's turn, for each second: nothing, if they wait well
    """

    number: int
    figures: dict[str, float]
    limits: dict[str, float]
    waiting: float


def take_turns(
    contest: Contest, seats: dict[str, Seat], numbers: range, measure_limits: Callable[[], dict[str, float]]
) -> Iterator[Turn]:
    """Let each engine measure one figure a turn; who begins changes. An engine that fails is out from then on."""
    for number in numbers:
        if not seats:
            return
        names = list(seats)
        first = number % len(names)
        limits, figures, waiting, elapsed = measure_limits(), {}, 0.0, 0.0
        for name in names[first:] + names[:first]:
            others = [seat for other, seat in seats.items() if other != name]
            _wait_until_quiet(list(seats.values()))
            before, start = sum(seat.cpu_seconds() for seat in others), time.monotonic()
            try:
                figures[name] = seats[name].figure(contest.letter, number)
            except RunError as error:
                print(f"turn {number} {name} {contest.precision}: {error}", file=sys.stderr, flush=True)
                seats.pop(name).close()
            elapsed += time.monotonic() - start
            waiting += sum(seat.cpu_seconds() for seat in others) - before
        yield Turn(number=number, figures=figures, limits=limits, waiting=waiting / elapsed)


def _wait_until_quiet(seats: list[Seat]) -> None:
    """Let the threads of who was last spin out: those of vLLM's OpenMP took a quarter of the next one's speed."""
    deadline = time.monotonic() + _LONGEST_SPIN_S
    while time.monotonic() < deadline:
        before = sum(seat.cpu_seconds() for seat in seats)
        time.sleep(_LOOK_S)
        if sum(seat.cpu_seconds() for seat in seats) - before < _QUIET * _LOOK_S:
            return


@contextlib.contextmanager
def seated(contest: Contest, engines: list[Engine], checkpoint: Path, setting: Setting) -> Iterator[dict[str, Seat]]:
    """Load the engines, one after the other: {name: its seat}. Who cannot take part is named on standard error."""
    seats: dict[str, Seat] = {}
    try:
        for engine in engines:
            source = engine.checkpoint(checkpoint, contest.precision)
            try:
                seats[engine.name] = Seat(
                    engine, source, contest.precision, contest.letter, caching=contest.caching, setting=setting
                )
            except RunError as error:
                print(f"{engine.name} {contest.precision}: {error}", file=sys.stderr, flush=True)
        yield seats
    finally:
        for seat in seats.values():
            seat.close()
