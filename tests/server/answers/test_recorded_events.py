"""Every part of an answer is told at the moment and with the start that were recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import recorded_events

sys.path.pop(0)
RECORDED = dict(line.split(": ") for line in (Path(__file__).parent / "events.txt").read_text().splitlines())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("kind", recorded_events.KINDS)
@pytest.mark.parametrize("name", recorded_events.FORMS)
def test_events_equal_recorded_events(name: str, kind: str) -> None:
    """After a change on purpose, compare the events and record anew: see `recorded_events`."""
    assert recorded_events.checksum(name, kind) == RECORDED[f"{name} {kind}"]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", recorded_events.FORMS)
def test_part_start_is_index_of_its_text_in_answer(name: str) -> None:
    for pieces, _, told in recorded_events.readings(name, "marks"):
        text, last = "".join(pieces), 0
        for index, kind, part, _, start in told:
            if kind in {"content", "reasoning"} and name != "GenericFormat":  # which writes text with escapes
                assert text.startswith(part, start), (pieces, part)
            arrived = len(text) if index == "end" else sum(map(len, pieces[: index + 1]))
            assert last <= start <= arrived
            last = start


def test_recorded_events_cover_every_format_and_kind_of_answer() -> None:
    assert [*RECORDED] == [f"{name} {kind}" for name in recorded_events.FORMS for kind in recorded_events.KINDS]
    assert len({*RECORDED.values()}) == len(RECORDED)
