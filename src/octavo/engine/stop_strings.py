"""Stop strings in a stream of text: found across any cut, and nothing that may belong to one is shown too early."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_END = "\ud800"  # stands behind each string: in no text, as it is no character
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string, and how many characters of the piece of text that it ends in stand behind it."""

    stop_string: str
    num_chars_behind: int


class StopStrings:
    """All stop strings of a request as one automaton (Aho and Corasick, 1975), made as far as its texts get into it.

    A node is a prefix of some strings, and a number: those of one string follow each other. What two strings share
    counts for the first of them, in alphabetical order; the other one branches off. Node 0 is the empty prefix.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        strings = sorted(set(stop_strings))
        self._characters = "".join(text + _END for text in strings)  # by node: the one that leads to the next node
        self._first_nodes = list(accumulate((len(text) + 1 for text in strings[:-1]), initial=0))
        self._branches: dict[int, dict[str, int]] = {}
        self._string_at = {first + len(text): text for first, text in zip(self._first_nodes, strings, strict=True)}
        self._branch_off(strings)
        num_nodes = len(self._characters)
        self._fallbacks = array("i", [_UNKNOWN]) * num_nodes  # the longest node that a node ends with
        self._stops = array("i", [0]) * num_nodes  # the longest string that it ends with, by that one's last node
        self._num_held_back = array("h", [0]) * num_nodes
        self.first_characters = frozenset({self._characters[0], *self._branches.get(0, ())})

    def _branch_off(self, strings: list[str]) -> None:
        lengths = [0]  # of what each string shares with the one before it
        for index, (before, text) in enumerate(pairwise(strings), start=1):
            length = _shared_length(before, text)
            lengths.append(length)
            first = index - 1
            while lengths[first] >= length and first:
                first -= 1
            branches = self._branches.setdefault(self._first_nodes[first] + length if length else 0, {})
            branches[text[length]] = self._first_nodes[index] + length + 1

    def next(self, node: int, character: str) -> int:
        """Return where a character leads: at most one deeper, so that each costs one step on average."""
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
        """Make a child known. So are the nodes that it ends with: only those of other strings are new as well."""
        fallback = self.next(self._fallbacks[node], character) if node else 0
        is_end = child in self._string_at
        self._fallbacks[child] = fallback
        self._stops[child] = child if is_end else self._stops[fallback]
        if is_end and child not in self._branches:
            self._num_held_back[child] = self._num_held_back[fallback]
        else:
            self._num_held_back[child] = child - self._first_nodes[bisect_right(self._first_nodes, child) - 1]

    def stop_at(self, node: int) -> str | None:
        """Return the longest stop string that a text ends with which led here."""
        end = self._stops[node]
        return self._string_at[end] if end else None

    def num_held_back_chars(self, node: int) -> int:
        """Return the length of the longest end of such a text with which a longer stop string begins."""
        return self._num_held_back[node]


class StopSearch:
    """Looks for stop strings in one text that comes in pieces."""

    __slots__ = ("_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0

    @property
    def num_held_back_chars(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string and must not be shown."""
        return self._stops.num_held_back_chars(self._node)

    def add(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Read on; return the stop string that ends first, and stop there, unless those that end here do not count.

        Of two that end at the same place the longer one counts, so the result is that of a search after every single
        character, however the text is cut into pieces. One that ends here may have begun where none counted.
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
    """Return how many characters two strings begin with alike."""
    return bisect_left(range(min(len(first), len(second))), True, key=lambda n: first[: n + 1] != second[: n + 1])


def num_held_back_chars(text: str, stop_string: str) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string; for a single short one."""
    for length in range(min(len(stop_string) - 1, len(text)), 0, -1):
        if text.endswith(stop_string[:length]):
            return length
    return 0
