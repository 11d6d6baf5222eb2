"""Modules that take seconds are imported when a test first uses them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sdks import LateModule

TESTS = Path(__file__).parent
LATE = re.compile(r"^(?:import|from) (?:anthropic|compressed_tensors|ollama|openai|transformers)\b", re.MULTILINE)


def test_no_test_file_imports_slow_sdk_at_collection() -> None:
    assert [path.name for path in TESTS.rglob("*.py") if LATE.search(path.read_text(encoding="utf-8"))] == []


def test_late_module_is_imported_at_first_attribute_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taking_seconds.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = LateModule("taking_seconds")
    assert not hasattr(late, "__test__"), "pytest asks for such names"
    assert not hasattr(late, "_mock_name")
    assert "taking_seconds" not in sys.modules
    assert late.ANSWER == 42
    monkeypatch.delitem(sys.modules, "taking_seconds")
