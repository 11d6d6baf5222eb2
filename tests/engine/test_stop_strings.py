from __future__ import annotations

import random

import pytest

from octavo.engine.stop_strings import find_stop, num_held_back_chars


def stream(text: str, cuts: list[int], stops: list[str], *, include: bool) -> tuple[str, str, str | None]:
    """Feed a text in pieces; return what was shown in all, the shortest shown before the end, and the stop."""
    seen, shown = "", ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece = text[start:end]
        seen += piece
        match = find_stop(seen, len(piece), stops, include_in_output=include) if piece else None
        if match is not None:
            return seen[: match.end], shown, match.stop_string
        shown = seen[: len(seen) - num_held_back_chars(seen, stops)]
    return seen, shown, None


def test_a_stop_string_is_cut_off_or_kept():
    assert find_stop("abcSTOPdef", 10, ["STOP"], include_in_output=False).end == 3
    assert find_stop("abcSTOPdef", 10, ["STOP"], include_in_output=True).end == 7
    assert find_stop("abcSTO", 6, ["STOP"], include_in_output=False) is None


def test_text_that_was_searched_before_is_not_searched_again():
    assert find_stop("STOP and more", 4, ["STOP"], include_in_output=False) is None
    assert find_stop("xxSTOP", 1, ["STOP"], include_in_output=False).end == 2


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("abS", ["STOP"], 1), ("abSTO", ["STOP"], 3), ("abc", ["STOP"], 0), ("a\n\n", ["\n\n\n"], 2), ("aab", ["abc"], 2)],
)
def test_the_beginning_of_a_stop_string_is_held_back(text, stops, held):
    assert num_held_back_chars(text, stops) == held


def test_any_cut_gives_the_same_text():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(1, 14)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        include = rng.random() < 0.5
        by_character = stream(text, list(range(1, len(text))), stops, include=include)
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1))) if len(text) > 1 else []
        whole, shown, stop = stream(text, cuts, stops, include=include)
        assert (whole, stop) == (by_character[0], by_character[2]), (text, stops, cuts)
        assert whole.startswith(shown), (text, stops, cuts)
