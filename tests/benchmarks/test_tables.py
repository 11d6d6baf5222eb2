"""What was measured and kept in benchmarks/results can be printed, whole."""

import datetime as dt
import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import tables  # noqa: E402

FILES = [path for paths in tables.named().values() for path in paths]
MACHINES = [path for path in FILES if path.suffix == ".json"]
FIELDS = {"title", "date", "commit", "commands", "results", "columns", "rows", "output", "notes"}


def test_every_result_file_has_registered_name():
    assert {path for path in tables.RESULTS.rglob("*") if path.is_file()} == set(FILES)
    assert MACHINES


@pytest.mark.sweep(16)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_result_file_is_printed_completely(path, capsys):
    (tables.print_tables if path in MACHINES else tables.print_comparison)(path)
    printed = capsys.readouterr().out
    if path in MACHINES:
        found = json.loads(path.read_bytes(), parse_float=str)["tables"]
        rows = [row for table in found for row in table.get("rows", ())]
        notes = [note for table in found for note in table.get("notes", ())]
        assert all(tables._row(row) in printed for row in rows)
        assert all(note in printed for note in notes)
    else:
        assert re.search(r"\| octavo \((?:bf16|W8A8)\) \|.* \d", printed)


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_result_tables_have_required_fields(path):
    found = json.loads(path.read_bytes())
    assert found.keys() == {"machine", "tables"}
    for table in found["tables"]:
        assert {"title", "date", "commit"} <= table.keys() <= FIELDS, table["title"]
        dt.date.fromisoformat(table["date"])
        assert ("columns" in table) == ("rows" in table)
        assert all(len(row) == len(table["columns"]) for row in table.get("rows", ())), table["title"]
        assert table.keys() & {"rows", "output", "notes"}, table["title"]
        if "results" in table:
            assert table["results"] in tables.named(), table["title"]


def test_unknown_result_name_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables.py", "amd-zen5", "amd-zen9"])
    with pytest.raises(SystemExit):
        tables.main()
    assert "there are no results named amd-zen9" in capsys.readouterr().err
