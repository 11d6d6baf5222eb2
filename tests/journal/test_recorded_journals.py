"""Journals of an earlier octavo, converted to the present format, replay with the recorded decisions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from journal.decisions import Row, WatchedScheduler, as_stored, differences, read_rows
from journal.record_decisions import RecordingError, record
from journal.scenarios import SCENARIOS, Scenario

from octavo.core import policy, scheduler
from octavo.errors import OctavoError
from octavo.journal.format import read_journal
from octavo.journal.replay import Player, replay

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from convert_journal import convert

RECORDED = Path(__file__).parent / "recorded"
NAMES = [each.name for each in SCENARIOS]


def decide_again(path: Path) -> tuple[list[Row], str]:
    """Replay a journal of the present format; return its decisions, and the error that ended the replay or "".

    A replay that deviates from the recorded run may ask for inputs that the journal does not have.
    """
    header, lines = read_journal(path)
    player = Player(header, lines)
    player.scheduler = watched = WatchedScheduler(player.scheduler, player.log)
    try:
        for line in lines:
            player.play(line)
        watched.end()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, OctavoError, TypeError, ValueError) as error:
        return as_stored(watched.rows), f"after step {len(watched.rows)} the replay failed: {error!r}"
    return as_stored(watched.rows), ""


def first_difference(name: str, folder: Path) -> str:
    """Convert and replay a recorded journal; return a message about the first decision that differs, or ""."""
    path = folder / f"{name}.journal"
    convert(RECORDED / f"{name}.journal.gz", path)
    recorded = read_rows(RECORDED / f"{name}.decisions.gz")
    decided, error = decide_again(path)
    return next(differences(recorded[: len(decided)] if error else recorded, decided), error)


def test_every_scenario_has_recorded_journal():
    assert sorted(each.name for each in RECORDED.glob("*.gz")) == sorted(
        f"{name}.{what}.gz" for name in NAMES for what in ("journal", "decisions")
    )
    assert sum(each.stat().st_size for each in RECORDED.iterdir()) < 400_000


@pytest.mark.sweep(20)
@pytest.mark.parametrize("name", NAMES)
def test_converted_journal_replays_with_recorded_decisions(name, tmp_path):
    assert first_difference(name, tmp_path) == ""


def test_converted_journal_replays_without_step_checksums(tmp_path):
    path = tmp_path / "new.journal"
    convert(RECORDED / "windows.journal.gz", path)
    done = replay(path)
    assert done.num_unchecked == done.num_steps == len(read_rows(RECORDED / "windows.decisions.gz")) - 1
    assert done.mismatches == []


def test_replay_detects_different_preemption_victim(tmp_path, monkeypatch):
    def most_important(running, rank, limit):
        fallible = [request for request in running if request.num_preemptions < limit]
        return min(fallible, key=rank, default=None)

    assert policy.choose_victim is scheduler.choose_victim
    monkeypatch.setattr(scheduler, "choose_victim", most_important)
    different = first_difference("fcfs", tmp_path)
    assert re.match(r"(after )?step \d+", different)


def test_differences_report_missing_rows_and_fields(tmp_path):
    rows = read_rows(RECORDED / "fcfs.decisions.gz")
    assert list(differences(rows, rows)) == []
    assert list(differences(rows, rows[:-1])) == [f"{len(rows)} rows were recorded, and there are {len(rows) - 1} now"]
    with_tokens = next(index for index, row in enumerate(rows) if "tokens" in row)
    changed = [*rows]
    changed[with_tokens] = {key: value for key, value in rows[with_tokens].items() if key != "tokens"}
    [told] = differences(rows, changed)
    assert told.startswith(f"step {rows[with_tokens]['step']}: tokens was [[")


@pytest.mark.turn(8)
def test_newly_recorded_scenario_replays_with_its_decisions(tmp_path):
    scenario = next(each for each in SCENARIOS if each.name == "everything")
    record(scenario, tmp_path)
    path = tmp_path / "everything.journal.gz"
    assert replay(path).mismatches == []
    assert replay(path).num_unchecked == 0
    rows = read_rows(tmp_path / "everything.decisions.gz")
    decided, error = decide_again(path)
    assert error == ""
    assert list(differences(rows, decided)) == []


def test_recording_without_required_events_is_refused(tmp_path):
    with pytest.raises(RecordingError, match="'swapped': \\(0, 1\\)"):
        record(Scenario("short", num_steps=5, shows={"swapped": 1}), tmp_path)
