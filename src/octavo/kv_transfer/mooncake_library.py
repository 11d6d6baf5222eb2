"""Tests that Mooncake's libraries load."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import KVTransferConfig

_LOAD_S = 60.0  # loading takes 0.1 s; a busy machine may need longer
_MISSING_LIBRARY = re.compile(r"(lib[^\s/]+\.so[.\d]*): (?:cannot open shared object file|file too short)")
_MISSING_PACKAGE = re.compile(r"No module named '?mooncake")
_DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def check_mooncake(config: KVTransferConfig) -> None:
    """Check in a child process that Mooncake's libraries load.

    Raises `ConfigError`, which says what to install.
    """
    if config.direct:
        _check_module("mooncake.engine", "kv_direct")
    if config.mooncake is not None:
        _check_module("mooncake.store", "kv_mooncake")


def _check_module(module: str, field: str) -> None:
    command = [sys.executable, "-c", f"import {module}"]
    try:
        loaded = subprocess.run(  # noqa: S603 - a command of ours
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{field} needs Mooncake, but {module} did not load within {_LOAD_S:g} s") from None
    if loaded.returncode:
        lines = loaded.stderr.strip().splitlines() or [f"exit status {loaded.returncode}"]
        raise ConfigError(f"{field} needs Mooncake, but {module} does not load ({lines[-1]}): {_remedy(loaded.stderr)}")


def _remedy(error: str) -> str:
    if _MISSING_PACKAGE.search(error):
        return "pip install 'octavo[mooncake]'"
    missing = _MISSING_LIBRARY.search(error)
    if missing is None:
        return f"run {sys.executable} -c 'import mooncake.engine' to see why"
    library = missing[1]
    package = _DEBIAN_PACKAGES.get(library)
    if package is None:
        return f"install the system package that has {library}"
    return f"install the system package that has {library} (Debian and Ubuntu: apt-get install {package})"
