"""An engine that needs Mooncake does not start if Mooncake's libraries do not load."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from mooncake_master import needs_mooncake

from octavo.build import build_core
from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_transfer.mooncake_library import check_mooncake

DIRECT = KVTransferConfig(role="decode", direct=True)
POOL = KVTransferConfig(mooncake="127.0.0.1:1")
NO_FILE = "cannot open shared object file: No such file or directory"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package mooncake with the given code in its modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(code):
        package = tmp_path / "mooncake"
        package.mkdir()
        for name in ("__init__", "engine", "store"):
            (package / f"{name}.py").write_text("" if name == "__init__" else code)

    return write


@pytest.mark.parametrize(("config", "field"), [(DIRECT, "kv_direct"), (POOL, "kv_mooncake")])
def test_missing_system_library_is_refused_before_model_load(install, config, field):
    install(f"raise ImportError('libibverbs.so.1: {NO_FILE}')")
    with pytest.raises(ConfigError, match=rf"{field} needs Mooncake.*libibverbs\.so\.1.*apt-get install libibverbs1"):
        build_core(EngineConfig(kv_transfer=config))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"raise ImportError('libcudart.so.12: {NO_FILE}')", r"the system package that has libcudart\.so\.12$"),
        ("raise ModuleNotFoundError(\"No module named 'mooncake'\")", r"pip install 'octavo\[mooncake\]'"),
        ("raise ImportError('undefined symbol')", r"undefined symbol.*to see why"),
        ("import os; os.kill(os.getpid(), 11)", r"exit status -11"),
    ],
)
def test_import_failure_names_remedy(install, code, message):
    install(code)
    with pytest.raises(ConfigError, match=message):
        check_mooncake(DIRECT)


def test_library_load_timeout_is_refused(install, monkeypatch):
    install("import time; time.sleep(60)")
    monkeypatch.setattr("octavo.kv_transfer.mooncake_library._LOAD_S", 0.2)
    with pytest.raises(ConfigError, match=r"mooncake\.engine did not load within 0\.2 s"):
        check_mooncake(DIRECT)


def test_each_library_is_loaded_in_child_process(monkeypatch):
    runs = []
    done = SimpleNamespace(returncode=0, stderr="a warning")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: (runs.append((*args, options)), done)[1])
    check_mooncake(KVTransferConfig(role="decode", direct=True, mooncake="127.0.0.1:1"))
    options = {
        "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace", "timeout": 60.0,
        "check": False,
    }  # fmt: skip
    modules = ("mooncake.engine", "mooncake.store")
    assert runs == [([sys.executable, "-c", f"import {module}"], options) for module in modules]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("", r"mooncake\.store does not load \(exit status 3\): run .* -c 'import mooncake.engine' to see why$"),
        ("a\nlast line\n", r"does not load \(last line\): run "),
        ("No module named mooncake", r"\): pip install 'octavo\[mooncake\]'$"),
        ("libnuma.so.1: file too short", r"has libnuma\.so\.1 \(Debian and Ubuntu: apt-get install libnuma1\)$"),
        ("libodd.so: cannot open shared object file", r"install the system package that has libodd\.so$"),
    ],
)
def test_load_error_names_last_line_and_remedy(monkeypatch, stderr, message):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3, stderr=stderr))
    with pytest.raises(ConfigError, match=rf"^kv_mooncake needs Mooncake, but .*{message}"):
        check_mooncake(POOL)


def test_other_stores_load_no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    check_mooncake(KVTransferConfig())
    check_mooncake(KVTransferConfig(disk_dir=tmp_path))


@needs_mooncake
def test_real_libraries_load_only_in_child_process():
    check_mooncake(DIRECT)
    check_mooncake(POOL)
    assert "mooncake.engine" not in sys.modules
