"""Find stop strings in text that arrives in pieces."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_END = "\ud800"  # a lone surrogate, which no valid text contains
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A found stop string. num_chars_after: Number of characters after the stop string in the searched piece."""

    stop_string: str
    num_chars_after: int


class StopStrings:
    """All stop strings as one automaton (Aho and Corasick, 1975).

    Each prefix of a stop string has a number, its node. Strings are sorted, and their prefixes are numbered string by
    string. A shared prefix keeps its first number.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        strings = sorted(set(stop_strings))
        self._characters = "".join(text + _END for text in strings)
        self._first_nodes = list(accumulate((len(text) + 1 for text in strings[:-1]), initial=0))
        self._branches: dict[int, dict[str, int]] = {}
        self._string_at = {first + len(text): text for first, text in zip(self._first_nodes, strings, strict=True)}
        self._branch_off(strings)
        num_nodes = len(self._characters)
        self._fallbacks = array("i", [_UNKNOWN]) * num_nodes  # by node: the failure link
        self._stops = array("i", [0]) * num_nodes  # by node: last node of the longest stop string that ends there
        # by node: see `StopSearch.num_held_back_chars`
        self.num_held_back_chars = array("h", [0]) * num_nodes
        self.first_characters = frozenset({self._characters[0], *self._branches.get(0, ())})

    def _branch_off(self, strings: list[str]) -> None:
        lengths = [0]
        for index, (before, text) in enumerate(pairwise(strings), start=1):
            length = _shared_length(before, text)
            lengths.append(length)
            first = index - 1
            while lengths[first] >= length and first:
                first -= 1
            branches = self._branches.setdefault(self._first_nodes[first] + length if length else 0, {})
            branches[text[length]] = self._first_nodes[index] + length + 1

    def next(self, node: int, character: str) -> int:
        """Return the node after one more character. Takes amortized constant time."""
        while True:
            if self._characters[node] == character:
                child = node + 1
            else:
                child = self._branches[node].get(character, 0) if node in self._branches else 0
            if child:
                if self._fallbacks[child] == _UNKNOWN:
                    self._reach(node, character, child)
                return child
            if not node:
                return 0
            node = self._fallbacks[node]

    def _reach(self, node: int, character: str, child: int) -> None:
        fallback = self.next(self._fallbacks[node], character) if node else 0
        is_end = child in self._string_at
        self._fallbacks[child] = fallback
        self._stops[child] = child if is_end else self._stops[fallback]
        if is_end and child not in self._branches:
            self.num_held_back_chars[child] = self.num_held_back_chars[fallback]
        else:
            self.num_held_back_chars[child] = child - self._first_nodes[bisect_right(self._first_nodes, child) - 1]

    def stop_at(self, node: int) -> str | None:
        """Return the longest stop string that ends at a node."""
        end = self._stops[node]
        return self._string_at[end] if end else None


class StopSearch:
    """Searches one text, which arrives in pieces."""

    __slots__ = ("_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0

    @property
    def num_held_back_chars(self) -> int:
        """Number of characters at the text's end that may be the start of a stop string."""
        return self._stops.num_held_back_chars[self._node]

    def add(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Search the next piece of the text. Return the first stop string that ends in this piece, or None.

        If two stop strings end at the same character, the longer one is returned.

        counts: False to ignore stop strings that end in this piece. A later call can still find stop strings that begin
        in this piece.
        """
        stops = self._stops
        if not self._node and stops.first_characters.isdisjoint(text):
            return None
        for index, character in enumerate(text, start=1):
            self._node = stops.next(self._node, character)
            if counts and (stop := stops.stop_at(self._node)) is not None:
                return StopMatch(stop, len(text) - index)
        return None


def _shared_length(first: str, second: str) -> int:
    return bisect_left(range(min(len(first), len(second))), True, key=lambda n: first[: n + 1] != second[: n + 1])


def num_held_back_chars(text: str, stop_string: str) -> int:
    """Return how many characters at the text's end may be the start of the stop string."""
    end = text[max(len(text) - len(stop_string) + 1, 0) :]
    first = end.find(stop_string[:1])
    while first >= 0:
        if stop_string.startswith(end[first:]):
            return len(end) - first
        first = end.find(stop_string[:1], first + 1)
    return 0
