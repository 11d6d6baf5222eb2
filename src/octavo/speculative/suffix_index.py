"""Drafts the tokens after earlier occurrences of a suffix.

An n-gram index over a ring buffer replaces SuffixDecoding's suffix tree. Hits are compared token by token.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    Hit = tuple[int, int]  # end position and length of a match

NGRAM = 3  # shortest match
MAX_MATCH = 32  # longest match
MIN_CAPACITY = 2 * NGRAM
BYTES_PER_TOKEN = 2 * array("i").itemsize + 2 * array("q").itemsize
_BOUNDARY = -1
_TOKEN_BITS = 8 * array("i").itemsize
_MAX_HITS = 6
_MAX_STEPS = 64  # limit on visited entries of a hash chain
_MAX_LENGTHS = 2


class SuffixIndex:
    """An index of the newest `capacity` tokens of several texts. Each text has an owner.

    Positions count all tokens ever written. A hash of owner and NGRAM tokens maps to its latest position. Each position
    links to the previous one with an equal hash.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, MIN_CAPACITY)
        self.num_tokens = 0  # ever written, including boundaries
        self._oldest = 0
        self._tokens = array("i", [_BOUNDARY]) * self.capacity
        self._owners = array("i", [0]) * self.capacity
        self._previous = array("q", [-1]) * self.capacity
        self._heads = array("q", [-1]) * self.capacity

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        arrays = (self._tokens, self._owners, self._previous, self._heads)
        return sum(len(each) * each.itemsize for each in arrays)

    @property
    def oldest(self) -> int:
        """Oldest kept position."""
        return max(self._oldest, self.num_tokens - self.capacity)

    def extend(self, token_ids: Iterable[int], owner: int = 0) -> None:
        """Append tokens to the newest text."""
        capacity, tokens, owners = self.capacity, self._tokens, self._owners
        previous, heads = self._previous, self._heads
        end = self.num_tokens
        place = end % capacity
        first = tokens[place - 2] if end > 1 else _BOUNDARY
        second = tokens[place - 1] if end else _BOUNDARY
        for third in token_ids:
            tokens[place] = third
            owners[place] = owner
            if first >= 0 and second >= 0:
                slot = hash((owner, first, second, third)) % capacity
                previous[place] = heads[slot]
                heads[slot] = end
            first, second = second, third
            end += 1
            place += 1
            if place == capacity:
                place = 0
        self.num_tokens = end

    def close(self) -> None:
        """End the newest text. No match or draft crosses an end."""
        self._tokens[self.num_tokens % self.capacity] = _BOUNDARY
        self.num_tokens += 1

    def drop(self, position: int) -> None:
        """Discard tokens before a position."""
        self._oldest = max(self._oldest, position)

    def propose(
        self, suffix: array[int], most: int, *, owner: int = 0, factor: float = 1.0, min_probability: float = 0.0
    ) -> tuple[list[int], float]:
        """Return the best continuation of the suffix in the owner's texts, and the expected number of accepted tokens.

        If the newest text is not closed, the suffix must be its end. A hit is an earlier occurrence of the suffix's
        last tokens. Each of the two longest match lengths gives a draft, from the hits with at least this length:

        - The draft has at most `most` tokens, and at most factor times the match length.
        - The next token is the most frequent one in hits that continue with the draft so far. On a tie, the newest hit
          wins.
        - Its probability is its share of these hits times the previous token's probability. The draft ends before a
          probability below min_probability.

        The draft with the largest sum of probabilities is returned (SuffixDecoding, section 4).
        """
        hits = self._find(suffix, owner)
        best: list[int] = []
        best_score = 0.0
        lengths = sorted({length for _, length in hits}, reverse=True)[:_MAX_LENGTHS]
        if not lengths:
            return [], 0.0
        runs = self._runs([position for position, _ in hits], min(most, int(factor * lengths[0])))
        for length in lengths:
            num_drafts = min(most, int(factor * length))
            if best_score >= num_drafts:
                break
            longer = [run for run, (_, matched) in zip(runs, hits, strict=True) if matched >= length]
            draft, score = _most_frequent(longer, num_drafts, min_probability)
            if score > best_score:
                best, best_score = draft, score
        return best, best_score

    def _find(self, suffix: array[int], owner: int) -> list[Hit]:
        capacity, tokens, owners, previous = self.capacity, self._tokens, self._owners, self._previous
        suffix = suffix[-min(MAX_MATCH, capacity) :]
        length = len(suffix)
        if length < NGRAM:
            return []
        as_number, to_number = int.from_bytes(suffix.tobytes(), "little"), int.from_bytes
        oldest, last = self.oldest + NGRAM - 1, self.num_tokens - 1
        position = self._heads[hash((owner, *suffix[-NGRAM:])) % capacity]
        hits: list[Hit] = []
        for _ in range(_MAX_STEPS):
            if position < oldest:
                break
            place = position % capacity
            if owners[place] == owner and position < last:
                start = place + 1 - length
                stood = tokens[start : place + 1] if start >= 0 else tokens[start:] + tokens[: place + 1]
                # The highest differing bit belongs to the last token that differs.
                differing = (to_number(stood.tobytes(), "little") ^ as_number).bit_length()
                num_same = length - (differing + _TOKEN_BITS - 1) // _TOKEN_BITS
                if num_same >= NGRAM:
                    hits.append((position + 1, min(num_same, position - oldest + NGRAM)))
                    if len(hits) == _MAX_HITS:
                        break
            position = previous[place]
        return hits

    def _runs(self, positions: list[int], length: int) -> list[list[int]]:
        capacity, tokens, end = self.capacity, self._tokens, self.num_tokens
        runs = [tokens[each % capacity : each % capacity + length].tolist() for each in positions]
        for index, position in enumerate(positions):
            run, num_left = runs[index], end - position
            if len(run) < length:
                run += tokens[: length - len(run)]
            if num_left < length:
                runs[index] = [run[each % num_left] for each in range(length)]
        return runs


def _most_frequent(runs: list[list[int]], num_tokens: int, min_probability: float) -> tuple[list[int], float]:
    draft: list[int] = []
    score, probability = 0.0, 1.0
    for depth in range(num_tokens):
        found = [run[depth] for run in runs]
        token_id, count = found[0], found.count(found[0])
        if count < len(found):
            if 2 * count < len(found):
                token_id = max(found, key=found.count)
                count = found.count(token_id)
            probability *= count / len(found)
            runs = [run for run in runs if run[depth] == token_id]
        if token_id < 0 or probability < min_probability:
            break
        draft.append(token_id)
        score += probability
    return draft, score
