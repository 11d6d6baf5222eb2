"""Keeps answers of ended requests as drafts for later requests."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

from octavo.speculative.suffix_index import BYTES_PER_TOKEN, SuffixIndex

if TYPE_CHECKING:
    from array import array

BYTES_PER_ANSWER = 400  # measured


class Answers:
    """A ring buffer of answers, limited in bytes and number. Each cache salt is one owner in the index."""

    def __init__(self, max_bytes: int, max_answers: int) -> None:
        self._index = SuffixIndex(max_bytes // BYTES_PER_TOKEN)
        self._max_answers = max_answers
        self._ends: deque[tuple[int, bytes]] = deque()  # end position and digest of the salt
        self._owners: dict[bytes, list[int]] = {}  # by digest of the salt: owner number, number of answers
        self._free: list[int] = []

    @staticmethod
    def bytes_of(max_bytes: int, max_answers: int) -> int:
        """Return the maximum memory."""
        return max_bytes + max_answers * BYTES_PER_ANSWER

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, token_ids: list[int], cache_salt: str | None) -> None:
        """Keep an answer. token_ids: the prompt's last tokens and the answer."""
        while len(self._ends) >= self._max_answers:
            self._index.drop(self._ends[0][0])
            self._release_oldest()
        digest = _digest(cache_salt)
        # If no owner number is free, all numbers below len(self._owners) are in use.
        number = self._free.pop() if self._free and digest not in self._owners else len(self._owners)
        owner = self._owners.setdefault(digest, [number, 0])
        owner[1] += 1
        self._index.extend(token_ids, owner[0])
        self._index.close()
        self._ends.append((self._index.num_tokens, digest))
        while self._ends[0][0] <= self._index.oldest:
            self._release_oldest()

    def propose(
        self, suffix: array[int], most: int, cache_salt: str | None, *, factor: float, min_probability: float
    ) -> tuple[list[int], float]:
        """Draft from answers with this salt. See `SuffixIndex.propose`."""
        owner = self._owners.get(_digest(cache_salt))
        if owner is None:
            return [], 0.0
        return self._index.propose(suffix, most, owner=owner[0], factor=factor, min_probability=min_probability)

    def _release_oldest(self) -> None:
        _, digest = self._ends.popleft()
        owner = self._owners[digest]
        owner[1] -= 1
        if not owner[1]:
            del self._owners[digest]
            self._free.append(owner[0])


def _digest(cache_salt: str | None) -> bytes:
    return b"" if cache_salt is None else hashlib.sha256(cache_salt.encode()).digest()
