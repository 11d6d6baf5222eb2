"""The scripts of `benchmarks/` and `tools/` can be imported and parse their options."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("benchmarks", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '"__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_script_prints_its_help(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    assert f"usage: {path.name}" in capsys.readouterr().out
