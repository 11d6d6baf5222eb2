"""Stop strings in a stream of text: found across any cut, and nothing that may belong to one is shown too early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that was found, and where the text ends because of it."""

    stop_string: str
    end: int


def find_stop(text: str, num_new_chars: int, stop_strings: list[str], *, include_in_output: bool) -> StopMatch | None:
    """Find the stop string that ends first in `text`, of which the last `num_new_chars` were not searched before.

    Of two that end at the same place the one that starts first counts, so the result is that of a search after every
    single character, however the text was cut into pieces.
    """
    best: tuple[int, int, str] | None = None
    for stop in stop_strings:
        start = text.find(stop, max(len(text) - num_new_chars - len(stop) + 1, 0))
        if start != -1:
            candidate = (start + len(stop), start, stop)
            best = candidate if best is None else min(best, candidate)
    if best is None:
        return None
    end, start, stop = best
    return StopMatch(stop, end if include_in_output else start)


def num_held_back_chars(text: str, stop_strings: list[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string and must not be shown yet."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
