"""The tool for another version of Python finds an interpreter that starts, and reports the tests that were not run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import debian_python
import other_python


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any interpreters except those that a test makes."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_interpreter_that_does_not_start_is_ignored(machine: Path) -> None:
    program(machine / "bin" / "python9.9", "echo 'pyenv: python9.9: command not found' >&2; exit 127")  # pyenv's shim
    assert other_python.find_interpreter("9.9") is None
    found = program(machine / "pyenv" / "versions" / "9.9.1" / "bin" / "python", "echo 9.9")
    program(machine / "pyenv" / "versions" / "9.9.0" / "bin" / "python", "echo 9.8")
    assert other_python.find_interpreter("9.9") == other_python.Interpreter(found, "pyenv")


def test_interpreter_of_uv_is_found(machine: Path) -> None:
    python = program(machine / "uv" / "python", "echo 9.9")
    program(machine / "bin" / "uv", f"echo {python}")
    assert other_python.find_interpreter("9.9") == other_python.Interpreter(python, "uv")


def test_unavailable_python_version_is_reported_as_skip_with_status_3(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*_arguments: object) -> Path:
        raise debian_python.UnavailableError("Debian's sid and trixie have no python9.9, or cannot be reached")

    monkeypatch.setattr(debian_python, "unpack_python", unavailable)
    monkeypatch.setattr(other_python, "run", lambda *_arguments: "")
    assert other_python.main(["9.9", "--environment", str(machine / "e"), "--torch", "torch==0"]) == 3
    said = capsys.readouterr().out
    assert said.startswith("SKIPPED: no test was run on Python 9.9: ")
    assert "have no python9.9" in said


@pytest.mark.parametrize("torch", ["2.14.1", None])
@pytest.mark.parametrize("status", [0, 1])
def test_last_line_reports_python_torch_and_tested_packages(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch: str | None, status: int
) -> None:
    program(machine / "bin" / "python9.9", "echo 9.9")
    monkeypatch.setattr(other_python.Environment, "make", lambda _self: None)
    monkeypatch.setattr(other_python.Environment, "add_torch", lambda _self, _wheel: torch)
    monkeypatch.setattr(other_python.Environment, "add_octavo", lambda _self, *, with_kernels: None)
    given = list[object]()
    monkeypatch.setattr(other_python, "run_tests", lambda *arguments: given.append(arguments) or status)
    assert other_python.main(["9.9", "--environment", str(machine), "--torch", "torch==0", "--", "-x"]) == status
    ((_, rooms, options),) = given
    assert options == ["-x"]
    assert ("engine" in rooms) is (torch is not None)
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said.startswith("Python 9.9 from PATH with ")
    assert ("torch 2.14.1" in said) is (torch is not None)
    assert ("FAILED with status 1" in said) is (status == 1)
    assert ", ".join(rooms) in said


def test_missing_apt_get_raises_unavailable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(debian_python.UnavailableError, match="this machine has no apt-get"):
        debian_python.unpack_python("9.9", tmp_path / "debian", tmp_path / "patchelf")
