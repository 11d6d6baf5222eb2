"""Journals of an earlier octavo, brought to the present format, replay with the decisions that it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from journal.decisions import WatchedScheduler, differences, read_rows
from journal.record_decisions import RecordingError, record
from journal.scenarios import SCENARIOS, Scenario

from octavo.core import policy, scheduler
from octavo.journal.format import read_journal
from octavo.journal.replay import Player, replay

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from convert_journal import convert

RECORDED = Path(__file__).parent / "recorded"
NAMES = [each.name for each in SCENARIOS]


def decide_again(path: Path) -> list[dict]:
    """Replay a journal of the present format; return the decisions as they would have been recorded."""
    player = Player(*(read := read_journal(path)))
    player.scheduler = watched = WatchedScheduler(player.scheduler, player.log)
    for line in read[1]:
        player.play(line)
    watched.end()
    return json.loads(json.dumps(watched.rows))


def first_difference(name: str, folder: Path) -> str | None:
    """Convert a recorded journal and replay it; say which decision is the first that differs, None if none does."""
    path = folder / f"{name}.journal"
    convert(RECORDED / f"{name}.journal.gz", path)
    return next(differences(read_rows(RECORDED / f"{name}.decisions.gz"), decide_again(path)), None)


def test_there_is_a_journal_for_each_scenario():
    assert sorted(each.name for each in RECORDED.glob("*.gz")) == sorted(
        f"{name}.{what}.gz" for name in NAMES for what in ("journal", "decisions")
    )
    assert sum(each.stat().st_size for each in RECORDED.iterdir()) < 400_000


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_journal_replays_with_the_recorded_decisions(name, tmp_path):
    assert (different := first_difference(name, tmp_path)) is None, different


def test_a_converted_journal_is_replayed_without_comparing_steps(tmp_path):
    path = tmp_path / "new.journal"
    convert(RECORDED / "windows.journal.gz", path)
    done = replay(path)
    assert done.num_unchecked == done.num_steps == len(read_rows(RECORDED / "windows.decisions.gz")) - 1
    assert done.mismatches == []


def test_another_victim_is_noticed(tmp_path, monkeypatch):
    def most_important(running, rank, limit):
        fallible = [request for request in running if request.num_preemptions < limit]
        return min(fallible, key=rank, default=None)

    assert policy.choose_victim is scheduler.choose_victim
    monkeypatch.setattr(scheduler, "choose_victim", most_important)
    different = first_difference("fcfs", tmp_path)
    assert different is not None
    assert different.startswith("step ")


def test_a_decision_that_was_left_out_is_noticed(tmp_path):
    rows = read_rows(RECORDED / "fcfs.decisions.gz")
    assert list(differences(rows, rows)) == []
    assert list(differences(rows, rows[:-1])) == [f"{len(rows)} rows were recorded, and there are {len(rows) - 1} now"]
    with_tokens = next(index for index, row in enumerate(rows) if "tokens" in row)
    changed = [*rows]
    changed[with_tokens] = {key: value for key, value in rows[with_tokens].items() if key != "tokens"}
    [told] = differences(rows, changed)
    assert told.startswith(f"step {rows[with_tokens]['step']}: tokens was [[")


def test_what_is_recorded_now_replays_with_its_decisions(tmp_path):
    scenario = next(each for each in SCENARIOS if each.name == "everything")
    record(scenario, tmp_path)
    path = tmp_path / "everything.journal.gz"
    assert replay(path).mismatches == []
    assert replay(path).num_unchecked == 0
    rows = read_rows(tmp_path / "everything.decisions.gz")
    assert next(differences(rows, decide_again(path)), None) is None


def test_a_scenario_without_its_events_is_refused(tmp_path):
    with pytest.raises(RecordingError, match="'swapped': \\(0, 1\\)"):
        record(Scenario("short", num_steps=5, shows={"swapped": 1}), tmp_path)
