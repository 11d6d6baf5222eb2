"""Runs the steps of deploy/Containerfile in a folder, because a container engine is not available everywhere.

Absolute paths of the image are replaced by paths in the folder. `apt-get` and `useradd` are replaced by scripts that
write down their arguments. The compiler does not optimize, because kernels take long to compile otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
# Not the paths of URLs, nor parts of longer paths.
IMAGE_PATH = re.compile(r"(?<![\w./:-])/(?=(?:opt|source|wheels|var|etc)\b)")
PACKAGES_HOST = "download.pytorch.org"


class Instruction(NamedTuple):
    """An instruction of a container file."""

    name: str
    argument: str


def read_stages() -> list[list[Instruction]]:
    """Return the instructions of each stage, with continued lines joined."""
    lines = [line for line in CONTAINERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    stages: list[list[Instruction]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, argument = line.partition(" ")
        if name == "FROM":
            stages.append([])
        if name:
            stages[-1].append(Instruction(name, argument.strip()))
    return stages


def argument_of(name: str) -> str:
    """Return the argument of the last stage's only instruction of this name."""
    [argument] = [each.argument for each in read_stages()[-1] if each.name == name]
    return argument


@dataclass
class Sandbox:
    """A folder in place of an image's root directory. calls: The commands that were only written down."""

    root: Path
    arguments: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stubs = self.root.with_name("stubs")
        self._stubs.mkdir()
        self._log = self._stubs / "calls"
        self._log.touch()
        self.root.mkdir()
        base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        for name, script in (
            ("python", f'exec {base} "$@"'),
            ("apt-get", f'echo apt-get "$@" >> {self._log}'),
            ("useradd", f'echo useradd "$@" >> {self._log}'),
            ("unoptimized", 'exec c++ "$@" -O0'),
        ):
            stub = self._stubs / name
            stub.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            stub.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines()

    def path(self, text: str) -> str:
        """Replace the image's absolute paths in a text."""
        return IMAGE_PATH.sub(f"{self.root}/", text)

    def environment(self) -> dict[str, str]:
        """Return the environment of a command, without variables that lead to the checkout."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "OCTAVO"))
        }
        more = {
            "PATH": f"{self._stubs}:{os.environ['PATH']}",
            "CXX": str(self._stubs / "unoptimized"),
            "HOME": str(self.root),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "TMPDIR": str(self._stubs),
        }
        return {**kept, **more, **self.arguments}

    def run(self, command: str | list[str]) -> str:
        """Run a command of the image; return its output. Raises `RuntimeError` with the output if it fails."""
        words = ["sh", "-c", self.path(command)] if isinstance(command, str) else [self.path(each) for each in command]
        done = subprocess.run(words, cwd=self.root, env=self.environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def execute(self, stage: list[Instruction]) -> None:
        """Execute the steps of a stage that change files."""
        for name, argument in stage:
            if name == "ARG":
                variable, _, default = argument.partition("=")
                self.arguments.setdefault(variable, default)
            elif name == "RUN":
                self.run(argument)
            elif name == "COPY" and argument == ". /source":
                self._copy_checkout()
            elif name == "COPY":
                self._keep_only(argument)

    def _copy_checkout(self) -> None:
        """Copy the files that git tracks or would track, which are those that .dockerignore lets through."""
        command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        for each in listed:
            if each and (ROOT / each).is_file():
                (self.root / "source" / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / each, self.root / "source" / each)

    def _keep_only(self, argument: str) -> None:
        """Keep one folder, as a stage does that copies it from an earlier stage to the same path."""
        source, given, wanted = argument.split()
        if source != "--from=build" or given != wanted:
            raise ValueError(f"not understood: COPY {argument}")
        kept, folder = self.root.with_name("kept"), Path(self.path(given))
        shutil.move(folder, kept)
        shutil.rmtree(self.root)
        folder.parent.mkdir(parents=True)
        shutil.move(kept, folder)


def torch_index(folder: Path) -> str:
    """Return the build argument TORCH_INDEX. Without access to the index pip must find torch with its own settings."""
    try:
        socket.getaddrinfo(PACKAGES_HOST, 443)
    except OSError:
        return folder.as_uri()
    return f"https://{PACKAGES_HOST}/whl/cpu"
