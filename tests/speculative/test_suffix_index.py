"""The index finds the drafts that a search finds, within its memory, and only in texts of the same owner."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from allocations import allocated_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.speculative import suffix_index
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, MAX_MATCH, NGRAM, SuffixIndex

END = -1


def propose(index: SuffixIndex, suffix: list[int], most: int = 8, **options) -> tuple[list[int], float]:
    return index.propose(array("i", suffix), most, **options)


class Search:
    """The definition: one list of all written tokens, of which the newest `capacity` are searched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.owners: list[int] = []

    def extend(self, token_ids: list[int], owner: int) -> None:
        self.tokens += token_ids
        self.owners += [owner] * len(token_ids)

    def close(self) -> None:
        self.extend([END], END)

    def propose(self, suffix, most, *, owner, factor, min_probability):
        oldest = max(len(self.tokens) - self.capacity, 0)
        suffix = suffix[-MAX_MATCH:]
        if len(suffix) < NGRAM:
            return [], 0.0
        hits = []
        for position in range(len(self.tokens) - 2, oldest + NGRAM - 2, -1):
            length = 0
            while (
                length < len(suffix)
                and position - length >= oldest
                and self.tokens[position - length] == suffix[-1 - length]
                and self.owners[position - length] == owner
            ):
                length += 1
            if length >= NGRAM:
                hits.append((position + 1, length))
        hits = hits[: suffix_index._MAX_HITS]
        best = ([], 0.0)
        for length in sorted({length for _, length in hits}, reverse=True)[: suffix_index._MAX_LENGTHS]:
            draft = self.follow(
                [position for position, matched in hits if matched >= length],
                min(most, int(factor * length)),
                min_probability,
            )
            if draft[1] > best[1]:
                best = draft
        return best

    def follow(self, positions, most, min_probability):
        draft, score, probability = [], 0.0, 1.0
        while len(draft) < most:
            text = self.tokens + draft
            found = [text[position + len(draft)] for position in positions]
            token = max(found, key=found.count)
            probability *= found.count(token) / len(found)
            if token == END or probability < min_probability:
                break
            draft.append(token)
            score += probability
            positions = [position for position, each in zip(positions, found, strict=True) if each == token]
        return draft, score


TOKENS = st.lists(st.integers(0, 3), max_size=40)
TEXTS = st.lists(st.tuples(TOKENS, st.integers(0, 2)), max_size=12)


@pytest.mark.turn(12)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=TEXTS,
    last=TOKENS,
    asked=TOKENS,
    owner=st.integers(0, 2),
    capacity=st.integers(8, 300),
    most=st.integers(0, 12),
    factor=st.sampled_from([0.4, 1.0, 3.0]),
    least=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_suffix_index_equals_linear_search(texts, last, asked, owner, capacity, most, factor, least):
    """In closed texts for any suffix, and in an open text for its own end; texts are written in parts and
    overwritten.
    """
    index, search = SuffixIndex(capacity), Search(capacity)
    options = {"owner": owner, "factor": factor, "min_probability": least}
    old_steps, suffix_index._MAX_STEPS = suffix_index._MAX_STEPS, 10**6
    try:
        for text, who in texts:
            index.extend(text[:5], who)
            index.extend(text[5:], who)
            search.extend(text, who)
            for each in (index, search):
                each.close()
            assert propose(index, asked, most, **options) == search.propose(asked, most, **options)
        for token in last:
            index.extend([token], owner)
            search.extend([token], owner)
            own_end = search.tokens[-len(last) :]
            own_end = own_end[len(own_end) - own_end[::-1].index(END) :] if END in own_end else own_end
            assert propose(index, own_end, most, **options) == search.propose(own_end, most, **options)
    finally:
        suffix_index._MAX_STEPS = old_steps
    assert index.num_tokens == len(search.tokens)
    assert index.nbytes == capacity * BYTES_PER_TOKEN


def test_longest_match_drafts_most_and_frequent_token_wins():
    index = SuffixIndex(1000)
    for text in ([1, 2, 3, 7, 7], [1, 2, 3, 8, 9], [1, 2, 3, 8, 6], [0, 5, 5, 5, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]):
        index.extend(text)
        index.close()
    assert propose(index, [9, 1, 2, 3]) == ([8, 6], 0.5 + 0.25)
    assert propose(index, [0, 5, 5, 5, 1, 2, 3]) == ([4] * 7, 7.0)
    assert propose(index, [5, 5, 1, 2, 3]) == ([4] * 5, 5.0)
    assert propose(index, [5, 5, 1, 2, 3], factor=0.4) == ([4] * 2, 2.0)
    assert propose(index, [2, 3]) == ([], 0.0), "two tokens are too few"


def test_matches_never_cross_text_end():
    index = SuffixIndex(100)
    index.extend([1, 2, 3, 4])
    index.close()
    index.extend([5, 6, 7, 8])
    index.close()
    assert propose(index, [1, 2, 3]) == ([4], 1.0)
    assert propose(index, [2, 3, 4]) == propose(index, [3, 4, 5]) == propose(index, [4, 5, 6]) == ([], 0.0)


def test_match_works_if_ring_is_shorter_than_suffix():
    """A match ends at the end of the ring, whatever the ring held before; tokens after it are read across the ring's
    end.
    """
    index = SuffixIndex(8)
    suffix = [9] * MAX_MATCH + [1, 2, 3]
    index.extend([*suffix, 5, 6, 7])
    assert propose(index, suffix, factor=0.5) == ([5, 6], 2.0), "two nines before it are left: five tokens match"
    assert propose(index, suffix) == ([5, 6, 7, 5, 6], 5.0)
    index.extend([4])
    assert propose(index, suffix) == ([5, 6, 7, 4], 4.0)


def test_hash_collisions_expose_no_tokens_across_owners(monkeypatch):
    monkeypatch.setattr(suffix_index, "hash", lambda _: 0, raising=False)
    index = SuffixIndex(100)
    index.extend([1, 2, 3, 4, 5], owner=1)
    index.close()
    index.extend([1, 2, 3, 6], owner=2)
    index.close()
    assert propose(index, [1, 2, 3], owner=1) == ([4, 5], 2.0)
    assert propose(index, [1, 2, 3], owner=2) == ([6], 1.0)
    assert propose(index, [1, 2, 3], owner=3) == propose(index, [3, 2, 1], owner=1) == ([], 0.0)


def test_oldest_tokens_are_overwritten_or_dropped():
    index = SuffixIndex(20)
    for first in range(0, 50, 10):
        index.extend(range(first, first + 9))
        index.close()
    assert (index.num_tokens, index.oldest) == (50, 30)
    assert propose(index, [20, 21, 22]) == ([], 0.0)
    assert propose(index, [30, 31, 32], 3) == ([33, 34, 35], 3.0)
    index.drop(31)
    assert propose(index, [30, 31, 32]) == ([], 0.0)
    assert propose(index, [31, 32, 33], 2) == ([34, 35], 2.0)
    index.drop(10)
    assert index.oldest == 31


def test_match_excludes_dropped_tokens():
    index = SuffixIndex(100)
    index.extend(range(1, 13))
    index.close()
    assert propose(index, [1, 2, 3, 4, 5]) == ([6, 7, 8, 9, 10], 5.0)
    index.drop(2)
    assert propose(index, [1, 2, 3, 4, 5]) == ([6, 7, 8], 3.0)


def test_suffix_index_nbytes_equals_held_memory():
    tracemalloc.start()
    index = SuffixIndex(20_000)
    index.extend(number % 7919 for number in range(50_000))
    held = allocated_in("speculative")
    tracemalloc.stop()
    assert index.nbytes == 20_000 * BYTES_PER_TOKEN
    assert 0 <= held - index.nbytes < 4096
