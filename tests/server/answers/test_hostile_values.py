"""Values made of the format's own marks are read as they were when the readings were recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hostile_values

sys.path.pop(0)
RECORDED = dict(line.split(": ") for line in (Path(__file__).parent / "hostile_outcomes.txt").read_text().splitlines())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", hostile_values.FAMILIES)
def test_marker_values_match_recorded_outcomes(name: str) -> None:
    """After an intended change, review the differences and record again: see `hostile_values`."""
    assert hostile_values.outcomes(name) == RECORDED[name]


def test_every_format_has_recorded_calls_and_text() -> None:
    assert RECORDED.keys() == hostile_values.FAMILIES.keys()
    for outcomes in RECORDED.values():
        assert {each[0] for each in outcomes.split()} >= {"c", "t"}
