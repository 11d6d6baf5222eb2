"""The tests pass under `python -O`, which drops `assert`: pytest keeps those of test files, and helpers raise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HELPERS = sorted(path for path in TESTS.rglob("*.py") if not path.name.startswith("test_"))
# Without a cache, because tests of another process may use it. pytest warns of -O, and warnings are errors here.
PYTEST = ("-O", "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning")


@pytest.mark.parametrize("path", HELPERS, ids=lambda path: str(path.relative_to(TESTS)))
def test_s4_test_helpers_contain_no_assert(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not lines, f"{path.name} asserts in lines {lines}, which python -O drops: raise AssertionError"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, *PYTEST, *arguments]
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.turn(16)
def test_s4_guards_refuse_hostile_input_under_python_O(tmp_path: Path) -> None:
    """Checks that refuse hostile files, keys and requests are not `assert`, which -O would drop. A wrong test still
    fails.
    """
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("def test_optimised():\n    if __debug__:\n        raise RuntimeError\n    assert 1 == 2\n")
    done = run("tests/server/test_threats.py", str(wrong), "-k", "s4 or s7 or s10 or s14 or s22 or optimised")
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "assert 1 == 2" in done.stdout
    assert re.search(r"\b1 failed, [1-9]\d+ passed", done.stdout), told
