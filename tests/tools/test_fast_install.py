"""Development tools are installed by uv with pip's configuration, or by pip."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import fast_install

CONFIGURATION = """\
:env:.cert='/etc/certificates.pem'
global.extra-index-url='file:///a/simple\\nfile:///b/simple'
global.find-links='/wheels\\n/more'
global.timeout='60'
global.constraint='/limits.txt'
install.index-url='https://example.org/simple'
"""


def test_uv_gets_indexes_and_wheels_of_pip():
    assert fast_install.uv_variables(CONFIGURATION) == {
        "SSL_CERT_FILE": "/etc/certificates.pem",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/limits.txt",
        "UV_DEFAULT_INDEX": "https://example.org/simple",
    }
    assert fast_install.uv_variables("") == {}


@pytest.mark.parametrize(("uv_status", "pip_runs"), [(0, 0), (2, 1)])
def test_pip_installs_if_uv_fails(monkeypatch, uv_status, pip_runs):
    commands = []

    def run(command, **_options):
        commands.append(command)
        return SimpleNamespace(returncode=uv_status if "uv" in command else 0, stdout="")

    monkeypatch.setattr(fast_install, "find_spec", lambda _: object())
    monkeypatch.setattr(fast_install.subprocess, "run", run)
    assert fast_install.main(["--editable", ".[dev]"]) == 0
    by_pip = [each for each in commands if "pip" in each and "uv" not in each and "install" in each]
    assert len(by_pip) == pip_runs


def test_pip_installs_without_uv(monkeypatch):
    commands = []
    monkeypatch.setattr(fast_install, "find_spec", lambda _: None)
    monkeypatch.setattr(
        fast_install.subprocess, "run", lambda command, **_: commands.append(command) or SimpleNamespace(returncode=3)
    )
    assert fast_install.main(["x"]) == 3
    assert [command[-1] for command in commands] == ["x"]
