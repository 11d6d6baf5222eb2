"""Test a release as users get it: an sdist and a wheel, the wheel in a fresh environment outside the checkout.

    python -m build && python tools/check_release.py dist      # `make release`; the wheel is compiled from the sdist

Checks that the sdist has all needed files and no others; that the wheel has the whole package, the compiled kernels and
the licences; and that in a new environment with the wheel's own dependencies `octavo generate` answers with these
kernels, and `octavo serve` answers a request and serves the dashboard's files. Exits with status 1 and the reason if a
check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
SOURCES = (
    "src/octavo",
    "csrc",
    "licenses",
    "CMakeLists.txt",
    "CHANGELOG.md",
    "LICENSE",
    "NOTICE",
    "README.md",
    "pyproject.toml",
)
LICENCES = {"LICENSE", "NOTICE", "nanobind.txt", "robin_map.txt", "uPlot.LICENSE"}
QUESTION, ANSWER = "What is 12 + 30?", "12 + 30 = 42"
START_S, ANSWER_S, END_S = 120.0, 60.0, 60.0  # on a busy machine
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
KERNELS = "from octavo.kernels import instruction_sets as s; print(*s())"


class ReleaseError(Exception):
    """A release fails a check. The message has the reason."""


def tracked(*paths: str) -> set[str]:
    """Return the files of the checkout that git tracks below `paths`."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in listed if name and (ROOT / name).exists()}


def check_changelog(version: str) -> None:
    """Check that the changelog has a section for a version."""
    if f"\n## [{version}] - " not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ReleaseError(f"CHANGELOG.md has no section of {version}")


def check_sdist(path: Path) -> None:
    """Compare an sdist with the files that it needs according to the checkout."""
    with tarfile.open(path) as archive:
        found = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    _compare(path.name, found - {".", "PKG-INFO"}, tracked(*SOURCES))


def check_wheel(path: Path) -> None:
    """Compare a wheel with the package's files, and look for kernels and licences."""
    with zipfile.ZipFile(path) as archive:
        found = set(archive.namelist())
    kernels = {name for name in found if re.fullmatch(r"octavo/_kernels\.\S+\.(so|pyd)", name)}
    if len(kernels) != 1:
        raise ReleaseError(f"{path.name} has {len(kernels)} files of compiled kernels, and should have one")
    metadata = {name for name in found if name.split("/")[0].endswith(".dist-info")}
    licences = {PurePosixPath(name).name for name in metadata if "/licenses/" in name}
    if licences != LICENCES:
        raise ReleaseError(f"{path.name} has the licences {sorted(licences)}, and should have {sorted(LICENCES)}")
    _compare(path.name, found - kernels - metadata, {name.removeprefix("src/") for name in tracked("src/octavo")})


def _compare(name: str, found: set[str], wanted: set[str]) -> None:
    if missing := wanted - found:
        raise ReleaseError(f"{name} lacks {', '.join(sorted(missing))}")
    if more := found - wanted:
        raise ReleaseError(f"{name} has what it should not have: {', '.join(sorted(more))}")


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel with what its server needs into a new environment; return the folder of its commands.

    Installs torch's build for CPUs first, as the README says, in the version that is installed here: the build on the
    package index has gigabytes of CUDA.
    """
    venv.create(folder, with_pip=True)
    commands = folder / "bin"
    pip = [str(commands / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    for command in (
        ["install", "--no-compile", "--no-deps", "--extra-index-url", CPU_WHEELS, torch],
        ["install", "--no-compile", f"{wheel}[server]"],
        ["check"],
    ):
        subprocess.run([*pip, *command], check=True, env=_environment())
    return commands


def _environment() -> dict[str, str]:
    """Return the environment without variables that could lead to the checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "OCTAVO"))}


def check_installed(commands: Path, version: str, elsewhere: Path) -> None:
    """Check the version, path, kernels and an answer of the installed package."""

    def output(*command: str) -> str:
        done = subprocess.run(
            [str(commands / command[0]), *command[1:]],
            cwd=elsewhere, env=_environment(), capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        if "without its compiled kernels" in done.stderr.lower():
            raise ReleaseError(f"{' '.join(command)} ran without the compiled kernels:\n{done.stderr}")
        return done.stdout

    if (said := output("octavo", "--version").strip()) != f"octavo {version}":
        raise ReleaseError(f"octavo --version says {said!r}, and the wheel is of {version}")
    place = Path(output("python", "-c", "import octavo; print(octavo.__file__)").strip())
    if not place.is_relative_to(commands.parent):
        raise ReleaseError(f"octavo was imported from {place}, which is not the new environment")
    if not (kernels := output("python", "-c", KERNELS).split()):
        raise ReleaseError("the compiled kernels cannot be loaded here")
    print("kernels:", *kernels)
    if ANSWER not in (answer := output("octavo", "generate", "--prompt", QUESTION, "--temperature", "0")):
        raise ReleaseError(f"octavo generate answered {answer!r}, and not {ANSWER!r}")


def check_server(commands: Path, elsewhere: Path) -> None:
    """Start a server on a free port; request an answer and every file of the dashboard; stop the server."""
    log = elsewhere / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [str(commands / "octavo"), "serve", "--port", "0"], cwd=elsewhere, env=_environment(), stderr=file
        )
    try:
        address = _address(server, log)
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0}
        answer = json.loads(_fetch(f"{address}/v1/chat/completions", body))["choices"][0]["message"]["content"]
        if answer != ANSWER:
            raise ReleaseError(f"octavo serve answered {answer!r}, and not {ANSWER!r}")
        names = sorted(tracked("src/octavo/server"))
        pages = [ROOT / name for name in names if "/static/" in name and not name.endswith(".LICENSE")]
        for page in pages:
            route = "dashboard" if page.name == "index.html" else f"dashboard/{page.name}"
            if _fetch(f"{address}/{route}") != page.read_bytes():
                raise ReleaseError(f"/{route} is not {page.relative_to(ROOT)}")
        print(f"served: an answer, {len(pages)} files of the dashboard")
        server.send_signal(signal.SIGTERM)
        if status := server.wait(END_S):
            raise ReleaseError(f"octavo serve ended with {status} after SIGTERM:\n{log.read_text()}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server has logged its address and is ready; return the address."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"at (http\S+)/v1", log.read_text()):
            try:
                _fetch(f"{found[1]}/ready")
            except (OSError, ReleaseError):
                pass  # it is loading
            else:
                return found[1]
        time.sleep(0.2)
    raise ReleaseError(f"octavo serve is not ready after {START_S:g} s, or ended:\n{log.read_text()}")


def _fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise ReleaseError(f"{url} is answered with {error.code}") from error
    return content


def main() -> None:
    """Check the one release in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with one sdist and one wheel")
    folder = parser.parse_args().folder.resolve()
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if (len(sdists), len(wheels)) != (1, 1):
        parser.error(f"{folder} has {len(sdists)} sdists and {len(wheels)} wheels; one of each is looked at")
    version = wheels[0].name.split("-")[1]
    try:
        check_changelog(version)
        check_sdist(sdists[0])
        check_wheel(wheels[0])
        with tempfile.TemporaryDirectory(prefix="octavo-release-") as name:
            commands = install(wheels[0], Path(name) / "environment")
            check_installed(commands, version, Path(name))
            check_server(commands, Path(name))
    except ReleaseError as error:
        sys.exit(str(error))
    print(f"{sdists[0].name} and {wheels[0].name} hold")


if __name__ == "__main__":
    main()
