"""Calls in tags with values made of the format's own marks, and their readings.

Some of them look exactly like another call, so the readings are recorded and not judged:

    cd tests; python -m server.answers.hostile_values > server/answers/hostile_outcomes.txt
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from call_slips import NAME, calls_of, read

from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.tagged_calls import TaggedFormat

FAMILIES = {each.name: each for each in FORMATS if issubclass(each, TaggedFormat)}
NUM_CASES = 120


def hostile(rng: random.Random, form: TaggedFormat) -> str:
    """Return a value of up to six pieces: marks of the format, whole or broken, heads, blanks and words."""
    closes, call_starts = form.value_closes.strip(), form.argument_starts(["text", "days", "other"])
    call = form.write([("now", {})])
    pieces = [
        closes, closes[:-1], closes[1:], closes[:-1] + "/>", closes[:-1] + " >", *call_starts, form.opener,
        form.call_opens, form.call_closes, form.closes, form.opens + "now" + form.named, call, call[: len(call) // 2],
        "\n", "\n\n", " ", "word", "x < y", "now", form.argument_opens,
    ]  # fmt: skip
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 7)))


def broken(rng: random.Random, form: TaggedFormat, text: str) -> str:
    """Return a call unchanged, or with one of its marks missing or cut."""
    marks = [each for each in (form.value_closes, form.call_closes, form.closes, form.argument_opens) if each.strip()]
    mark = rng.choice(marks).strip()
    places = [place for place in range(len(text)) if text.startswith(mark, place)]
    how = rng.randrange(4)
    if how == 0 or not places:
        return text
    place = rng.choice(places)
    kept = {1: "", 2: mark[:-1], 3: mark[1:]}[how]
    return text[:place] + kept + text[place + len(mark) :]


def reading(form: TaggedFormat, meant: dict[str, Any], pieces: list[str], *, is_cut: bool) -> str:
    """Return the reading: c for the call that was meant, o for another one, b for broken JSON, t for text."""
    parts = read(form, pieces, is_cut=is_cut)
    calls = calls_of(parts)
    if not calls:
        return "t"
    try:
        found = [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return "b"
    return "c" if found == [(NAME, meant)] else "o"


def outcomes(name: str) -> str:
    """Return two readings for each case of a format: of the whole answer, and of an answer cut off by a limit."""
    form, found = FAMILIES[name](), []
    for number in range(NUM_CASES):
        rng = random.Random(f"hostile {name} {number}")
        meant: dict[str, Any] = {"path": hostile(rng, form)}
        if rng.random() < 0.5:
            meant["text"] = hostile(rng, form)
        text = broken(rng, form, form.write([(NAME, meant)]))
        cut = rng.randrange(1, len(text) + 1)
        whole = reading(form, meant, [text], is_cut=False)
        if reading(form, meant, list(text), is_cut=False) != whole:
            raise AssertionError(f"{name} {number}: another reading character by character")
        found.append(whole + reading(form, meant, [text[:cut]], is_cut=True))
    return " ".join(found)


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}: {outcomes(name)}\n" for name in FAMILIES)
