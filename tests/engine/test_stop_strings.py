from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.stop_strings import StopMatch, StopSearch, StopStrings, num_held_back_chars
from octavo.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

ALPHABET = st.sampled_from("ab\n")


def find_by_search(text: str, num_new_chars: int, stops: list[str]) -> tuple[int, str] | None:
    """Return the end of the stop string that ends first, and that string; of several, the longest."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(len(text) - num_new_chars - len(stop) + 1, 0))
        if start != -1:
            candidate = (start + len(stop), start, stop)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else (best[0], best[2])


def held_back_by_search(text: str, stops: list[str]) -> int:
    """Return the length of the longest proper prefix of a stop string at the end of the text."""
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def stream(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str, str | None]:
    """Feed a text in pieces; return all text shown, the most shown before the end, and the stop string."""
    seen, shown, search = "", "", StopSearch(StopStrings(stops))
    for piece in pieces:
        seen += piece
        match = search.add(piece)
        if match is not None:
            end = len(seen) - match.num_chars_after
            return seen[: end if include else end - len(match.stop_string)], shown, match.stop_string
        shown = seen[: len(seen) - search.num_held_back_chars]
    return seen, shown, None


def test_stop_string_is_removed_or_included():
    assert stream(["abcSTOPdef"], ["STOP"])[0] == "abc"
    assert stream(["abcSTOPdef"], ["STOP"], include=True)[0] == "abcSTOP"
    assert stream(["abcSTO"], ["STOP"]) == ("abcSTO", "abc", None)


def test_text_searched_before_is_not_searched_again():
    search = StopSearch(StopStrings(["STOP"]))
    assert search.add("STOP and", counts=False) is None
    assert search.add(" more") is None
    assert search.add("xxSTO", counts=False) is None  # begins before stop strings count
    assert search.add("Px").num_chars_after == 1


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("abS", ["STOP"], 1), ("abSTO", ["STOP"], 3), ("abc", ["STOP"], 0), ("a\n\n", ["\n\n\n"], 2), ("aab", ["abc"], 2)],
)
def test_prefix_of_stop_string_is_held_back(text, stops, held):
    search = StopSearch(StopStrings(stops))
    assert search.add(text) is None
    assert search.num_held_back_chars == held == num_held_back_chars(text, *stops)


def test_uncounted_stop_string_is_held_back_as_prefix_of_longer_one():
    """Before `min_tokens` a stop string ends nothing, but the longer one that begins with it may still match."""
    search = StopSearch(StopStrings(["ab", "abc"]))
    assert search.add("xab", counts=False) is None
    assert search.num_held_back_chars == 2
    assert search.add("c") == StopMatch("abc", 0)


def test_result_is_independent_of_piece_boundaries():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(1, 14)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        include = rng.random() < 0.5
        by_character = stream(list(text), stops, include=include)
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1))) if len(text) > 1 else []
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole, shown, stop = stream(pieces, stops, include=include)
        assert (whole, stop) == (by_character[0], by_character[2]), (text, stops, cuts)
        assert whole.startswith(shown), (text, stops, cuts)


@pytest.mark.turn(8)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(st.tuples(st.text(ALPHABET, max_size=6), st.booleans()), max_size=8),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=7), min_size=1, max_size=6),
)
def test_automaton_equals_naive_search(pieces, stops):
    """For every piece of any text, including pieces in which no stop string counts."""
    automaton = StopStrings(stops)
    for _ in range(2):  # with the states that the first text visited, and with all of them
        seen, search = "", StopSearch(automaton)
        for piece, counts in pieces:
            seen += piece
            match = search.add(piece, counts=counts)
            wanted = find_by_search(seen, len(piece), stops) if piece and counts else None
            assert wanted == (None if match is None else (len(seen) - match.num_chars_after, match.stop_string))
            if match is not None:
                break
            assert search.num_held_back_chars == held_back_by_search(seen, stops)


def worst_cases() -> dict[str, tuple[list[str], str]]:
    """Return the most and longest stop strings allowed, and texts that match long prefixes of them without an end."""
    size, count = MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
    return {
        "one letter": (["a" * (size - index) + "b" for index in range(1, count + 1)], "a" * 40_000),
        "its ends": (
            ["a" * index + "b" * (size - index - 1) + "c" for index in range(count)],
            ("a" * 64 + "b" * 950) * 40,
        ),
        "two letters": (["ab" * (size // 2 - index) + "c" for index in range(1, count + 1)], "ab" * 20_000),
        "each its own": ([chr(0x4E00 + index) * (size - 1) + "b" for index in range(count)], "狐" * 40_000),
    }


@pytest.fixture
def no_garbage():
    """Collect garbage of other tests first, so that it is not part of the measurement."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("name", worst_cases())
def test_worst_case_stop_strings_stay_fast(name):
    """Searching each piece for every string separately took up to 21 ms; with the automaton one token in a thousand
    takes 2 ms.
    """
    stops, text = worst_cases()[name]
    times_s = []
    for _ in range(3):
        start = time.thread_time()
        search = StopSearch(StopStrings(stops))
        times_s.append(time.thread_time() - start)
    assert min(times_s) < 10e-3
    times_s = []
    for position in range(0, len(text), 4):
        start = time.thread_time()
        assert search.add(text[position : position + 4]) is None
        times_s.append(time.thread_time() - start)
    assert sum(times_s) / len(times_s) < 100e-6
    assert sorted(times_s)[-len(times_s) // 1000] < 2e-3
