"""The words that the check of prose counts, and the bounds for rooms."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import check_prose


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Two rooms with one file each: the first has one hit in ten words, the second none."""
    (tmp_path / "a.py").write_text('"""Return the blocks that stand behind."""\n\nX = "as it is"  # a word\n')
    (tmp_path / "b.h").write_text("int where;  // the number of rows\n")
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    monkeypatch.setattr(check_prose, "BOUNDS", tmp_path / "bounds.csv")
    monkeypatch.setattr(check_prose, "rooms", lambda: {"a": [tmp_path / "a.py"], "b": [tmp_path / "b.h"]})
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["check_prose.py", *arguments])
    return check_prose.main()


def test_prose_check_counts_comments_and_docstrings_not_code(rooms):
    num_words, hits = check_prose.count([rooms / "a.py"])
    assert (num_words, [hit.word for hit in hits]) == (8, ["stand", "behind"])
    num_words, hits = check_prose.count([rooms / "b.h"])
    assert (num_words, hits) == (4, [])


def test_prose_check_skips_markdown_code_blocks(tmp_path):
    (tmp_path / "page.md").write_text("One.\n```\nwho goes there\n```\nTwo, where it is.\n")
    num_words, hits = check_prose.count([tmp_path / "page.md"])
    assert (num_words, [(hit.word, hit.line) for hit in hits]) == (5, [("where", 5)])


def test_prose_check_fails_for_package_above_bound(rooms, monkeypatch, capsys):
    (rooms / "bounds.csv").write_text("a,100\nb,5\n")
    assert run(monkeypatch) == 1
    assert "a: 2500 hits in 10,000 words, at most 100: see --lines a" in capsys.readouterr().out
    (rooms / "bounds.csv").write_text("a,2500\nb,5\n")
    assert run(monkeypatch) == 0


def test_lowering_prose_bounds_never_raises_them(rooms, monkeypatch):
    (rooms / "bounds.csv").write_text("a,9000\nb,5\n")
    assert run(monkeypatch, "--lower") == 0
    assert check_prose.read_bounds() == {"a": 2505, "b": 5}
    (rooms / "a.py").write_text('"""Who stands behind others?"""\n')
    assert run(monkeypatch, "--lower") == 1
    assert check_prose.read_bounds() == {"a": 2505, "b": 5}


def test_prose_check_lists_hits_with_replacements(rooms, monkeypatch, capsys):
    assert run(monkeypatch, "--lines", "a") == 0
    assert "a.py:1: behind (after): Return the blocks that stand behind." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, "--lines", "c")
