"""Measure loaded engines in turns, so that each gets nearly the same conditions of the machine.

On a shared machine, other programs may take half of the memory bandwidth for seconds or minutes. Rounds with one engine
after the other then compare different conditions. A turn lasts only seconds, and has the limits measured at its start.
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
        """Its name in tables."""
        return self.letter if self.letter != "D" else f"D {'on' if self.caching else 'off'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The results of a turn.

    figures  {engine: tokens/s or seconds}
    limits   of the machine, measured just before
    waiting  CPU seconds per second that waiting engines used in other engines' turns: 0 if they wait without spinning
    """

    number: int
    figures: dict[str, float]
    limits: dict[str, float]
    waiting: float


def take_turns(
    contest: Contest, seats: dict[str, Seat], numbers: range, measure_limits: Callable[[], dict[str, float]]
) -> Iterator[Turn]:
    """Have each engine measure one figure per turn, in an order that changes. A failed engine is dropped."""
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
    """Wait until threads of the last engine stop spinning: vLLM's OpenMP threads cost the next engine a quarter."""
    deadline = time.monotonic() + _LONGEST_SPIN_S
    while time.monotonic() < deadline:
        before = sum(seat.cpu_seconds() for seat in seats)
        time.sleep(_LOOK_S)
        if sum(seat.cpu_seconds() for seat in seats) - before < _QUIET * _LOOK_S:
            return


@contextlib.contextmanager
def seated(contest: Contest, engines: list[Engine], checkpoint: Path, setting: Setting) -> Iterator[dict[str, Seat]]:
    """Load the engines one after the other; yield {name: seat}. Print engines that fail to load on standard error."""
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
