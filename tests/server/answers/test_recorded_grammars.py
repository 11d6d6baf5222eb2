"""The grammars of calls are those that were recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))
import recorded_grammars

sys.path.pop(0)
RECORDED = dict(line.split(": ") for line in (Path(__file__).parent / "grammars.txt").read_text().splitlines())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", recorded_grammars.FORMS)
def test_tool_grammars_match_recorded_checksums(name: str) -> None:
    """After a change on purpose, record anew: see `recorded_grammars`."""
    found = recorded_grammars.checksums(name)
    assert found == {key: RECORDED[key] for key in found}


def test_every_tool_format_has_recorded_checksums() -> None:
    assert {*recorded_grammars.FORMS.values()} == {*FORMATS, GenericFormat}
    assert len(RECORDED) == len(recorded_grammars.FORMS) * 2 * (len(recorded_grammars.SCHEMAS) + 1)
    assert len(set(RECORDED.values())) > len(RECORDED) / 3
