"""The tool that starts the server many times counts hashes, resumes from its file, and fails on a second hash."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import start_many


def run(monkeypatch, path, starts, hashes):
    """Run the tool with starts that have these hashes. Return its exit status."""
    made = iter(hashes)
    monkeypatch.setattr(start_many, "start_once", lambda *_args: {"hash": next(made)})
    monkeypatch.setattr(start_many.signal, "signal", lambda *_args: None)
    monkeypatch.setattr(sys, "argv", ["start_many.py", "--starts", str(starts), "--file", str(path)])
    return start_many.main()


def test_recorded_starts_are_not_repeated(monkeypatch, tmp_path, capsys):
    path = tmp_path / "folder" / "starts.jsonl"
    assert run(monkeypatch, path, 2, ["a", "a"]) == 0
    with path.open("a") as file:
        file.write('{"hash": "a')  # from a run that was killed
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    assert run(monkeypatch, path, 3, ["a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a 3"
    assert run(monkeypatch, path, 3, []) == 0


@pytest.mark.parametrize("other", ["b", start_many.REFUSED])
def test_different_hash_fails_run(monkeypatch, tmp_path, capsys, other):
    assert run(monkeypatch, tmp_path / "starts.jsonl", 3, ["a", other, "a"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["a 2", f"{other} 1"]
    assert len([json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]) == 3


def test_zero_starts_exit_with_status_2(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path / "starts.jsonl", 0, []) == 2


def test_fixed_prompt_is_deterministic():
    assert start_many.fixed_prompt(3) == start_many.fixed_prompt(3)
    assert len(start_many.fixed_prompt(1300)) == 1300
