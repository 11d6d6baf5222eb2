"""The converter updates old journals to the current version. Unknown content is refused before anything is written."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from stores import Store

from octavo.core.transfer_scheduler import KVTransferScheduler
from octavo.data import events
from octavo.errors import ConfigError
from octavo.journal.format import VERSION, read_journal
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.journal.replay import replay
from octavo.journal.stores import RecordedConnector

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import convert_journal

RECORDED = Path(__file__).parents[1] / "journal" / "recorded"
HEADER = {"journal": 2, "start": 5, "num_blocks": 9, "num_host_blocks": 3, "connector": ""}


def write(path, header, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return path


def converted(tmp_path, header, *lines):
    """Convert a journal with this header and these lines. Return the new header and lines."""
    convert_journal.convert(write(tmp_path / "old", header, *lines), tmp_path / "new")
    return read_journal(tmp_path / "new")


def test_num_blocks_is_converted_to_kv_groups(tmp_path):
    header, lines = converted(tmp_path, HEADER, ["s", 3, 123], ["u", 4, [], []])
    assert header == {
        "journal": VERSION,
        "start": 5,
        "num_host_blocks": 3,
        "connector": "",
        "kv_groups": [{"kind": "full_attention", "num_blocks": 9}],
        "converted_from": 2,
    }
    assert lines == [["s", 3, None], ["u", 4, [], []]]


def test_num_window_blocks_is_converted_to_sliding_window_group(tmp_path):
    header, _ = converted(tmp_path, {**HEADER, "num_window_blocks": 7, "window": 20})
    assert header["kv_groups"][1:] == [{"kind": "sliding_window", "num_blocks": 7, "window": 20}]
    assert not {"num_blocks", "num_window_blocks", "window"} & set(header)


def test_draft_lines_are_merged_into_result_lines(tmp_path):
    header = {"journal": 3, "start": 5, "kv_groups": []}
    moves = [["host", 2, 200, 0.25]]
    lines = [["s", 1, 11], ["u", 2, [], []], ["g", 0, ""], ["d", {"1": 3}], ["s", 1, 12]]
    lines += [["u", 2, [], [], 0.5, 1, [1], moves], ["d", {"1": 2}], ["s", 1, 13], ["u", 2, [], []]]
    new_header, new = converted(tmp_path, header, *lines)
    assert new_header == {**header, "journal": VERSION, "converted_from": 3}
    assert [line[0] for line in new] == list("sugsusu")
    assert [line for line in new if line[0] == "u"] == [
        ["u", 2, [], [], 0.0, 0, [], [], {"1": 3}],
        ["u", 2, [], [], 0.5, 1, [1], moves, {"1": 2}],
        ["u", 2, [], []],
    ]
    assert [line[2] for line in new if line[0] == "s"] == [11, 12, 13]


@pytest.mark.parametrize("count", range(5))
def test_drafts_are_merged_into_result_lines_of_any_length(tmp_path, count):
    """Recorders of version 2 did not write all members."""
    members = [0.5, 1, [1], [["host", 2, 200, 0.25]]]
    _, [result] = converted(tmp_path, HEADER, ["u", 2, [], [], *members[:count]], ["d", {"1": 2}])
    assert result == ["u", 2, [], [], *members[:count], *[0.0, 0, [], []][count:], {"1": 2}]


@pytest.mark.parametrize("lines", [[["d", {}]], [["u", 2, [], []], ["s", 1, 1], ["d", {}]]])
def test_journal_drafts_without_result_are_refused(tmp_path, lines):
    with pytest.raises(ConfigError, match="old: drafts do not follow a result"):
        converted(tmp_path, {"journal": 3, "start": 5, "kv_groups": []}, *lines)
    assert not (tmp_path / "new").exists()


def test_journal_of_current_version_is_unchanged(tmp_path):
    header = {"journal": VERSION, "start": 5, "kv_groups": []}
    assert converted(tmp_path, header, ["s", 3, 123]) == (header, [["s", 3, 123]])


def test_store_answers_of_abort_are_moved_before_it(tmp_path):
    header = {**HEADER, "connector": "disk"}
    lines = [
        ["a", 0, 0, "r", "", 9, {}],
        ["k", [8]],
        ["s", 1, 1],
        ["f", 1, [0], "FINISHED_ABORTED"],
        ["g", 0, ""],
        ["k", [[0], None]],
        ["u", 1, [], []],
    ]
    _, new = converted(tmp_path, header, *lines)
    assert "".join(line[0] for line in new) == "kaskfgu"
    assert new[3] == ["k", [[0], None]]


def test_converted_journal_with_aborts_over_store_replays(tmp_path, make_core, monkeypatch):
    """Version 2 recorded no answers for aborts, only for steps and results."""
    monkeypatch.setattr(RecordingScheduler, "_note_answers", note_answers_as_version_2)
    store = RecordedConnector(Store(num_tokens=0, wants=True))
    core = make_core(connector=store)
    scheduler = core.scheduler
    clock = scheduler._clock = RecordedClock(scheduler._clock)
    path = tmp_path / "old"
    core.scheduler = recorder = RecordingScheduler(scheduler, clock, path, describe(scheduler), store)
    for name in "abc":
        core.add(name, 9)
    for _ in range(5):  # until each has a full block of its answer, to be saved when the request ends
        core.step()
    for name in "abc":
        recorder.abort_request(name)
    recorder.close()
    header, *lines = map(json.loads, path.read_text().splitlines())
    [group] = header.pop("kv_groups")
    write(tmp_path / "v2", {**header, "journal": 2, "num_blocks": group["num_blocks"]}, *lines)
    with pytest.raises(ConfigError, match="asked the KV store"):
        replay(path)
    convert_journal.convert(tmp_path / "v2", tmp_path / "new")
    done = replay(tmp_path / "new")
    assert [each.reason for each in done.log.events if isinstance(each, events.RequestFinished)] == ["abort"] * 3


def note_answers_as_version_2(self):
    """Write the answers unless the caller is an abort."""
    if sys._getframe(1).f_code.co_name in {"schedule", "update_from_output"}:
        self._write(["k", self._store.take_answers()])


@pytest.fixture
def make_core():
    from core.conftest import Core

    return Core


def test_replay_of_old_journal_reports_no_dropped_saves(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(KVTransferScheduler, "_report_dropped_saves", lambda _self, request: asked.append(request))
    convert_journal.convert(RECORDED / "store.journal.gz", tmp_path / "new")
    replay(tmp_path / "new")
    assert asked == []


@pytest.mark.parametrize("version", [0, 1, VERSION + 1, None, "2", [2], True])
def test_unknown_journal_version_is_refused(tmp_path, capsys, version):
    old = write(tmp_path / "old", {**HEADER, "journal": version})
    assert convert_journal.main([str(old), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    told = capsys.readouterr().err
    assert str(old) in told
    assert f"version {version!r}, and only versions 2, 3, {VERSION} can be read" in told


@pytest.mark.parametrize("text", ["", "{}\n", "nonsense\n", "[1]\n"])
def test_file_that_is_not_journal_is_refused(tmp_path, capsys, text):
    (tmp_path / "old").write_text(text)
    assert convert_journal.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    assert "journal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "lines"), [({"journal": 2}, []), (HEADER, [["s"]]), (HEADER, [[]]), (HEADER, [7]), (HEADER, [None])]
)
def test_damaged_journal_is_refused(tmp_path, capsys, header, lines):
    old = write(tmp_path / "old", header, *lines)
    assert convert_journal.main([str(old), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    assert "damaged journal of version 2" in capsys.readouterr().err


def test_converter_does_not_overwrite_existing_file(tmp_path, capsys):
    old = write(tmp_path / "old", HEADER)
    before = old.read_bytes()
    assert convert_journal.main([str(old), str(old)]) == 1
    assert old.read_bytes() == before
    assert "old cannot be written: File exists" in capsys.readouterr().err
    assert convert_journal.main([str(tmp_path / "none"), str(tmp_path / "new")]) == 1
    assert "none cannot be read as a journal" in capsys.readouterr().err


def test_converter_reads_and_writes_gzip_files(tmp_path, capsys):
    old, new = tmp_path / "old.gz", tmp_path / "new.gz"
    old.write_bytes(gzip.compress((json.dumps(HEADER) + "\n").encode()))
    assert convert_journal.main([str(old), str(new)]) == 0
    assert capsys.readouterr().out == f"{new}: version {VERSION}, from version 2\n"
    assert json.loads(gzip.decompress(new.read_bytes()))["journal"] == VERSION


def test_truncated_journal_is_converted_up_to_its_end(tmp_path):
    text = gzip.decompress((RECORDED / "swap_windows.journal.gz").read_bytes())
    (tmp_path / "old").write_bytes(text[: len(text) // 2])
    convert_journal.convert(tmp_path / "old", tmp_path / "new")
    assert replay(tmp_path / "new").num_steps > 50


def test_converter_help_names_both_files(capsys):
    with pytest.raises(SystemExit, match="0"):
        convert_journal.main(["--help"])
    told = capsys.readouterr().out
    assert "OLD" in told
    assert "NEW" in told
