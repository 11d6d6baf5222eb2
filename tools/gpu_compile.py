"""Compile the kernels that other stages launch: in several processes, which fill Triton's cache of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_device import Check, Entries

_STAGES = ("exactness", "correctness", "shares")  # they launch each kernel with each kind of arguments
_MOST_PROCESSES = 8  # each holds a context and some tensors on the device


def compiled(check: Check, entries: Entries) -> None:
    """Run the stages that launch single kernels once, divided among processes. Their results are not kept."""
    if check.is_dry:
        entries.add("kernels", lambda: {"left_out": "the interpreter compiles nothing"})
        return
    count = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))
    for stage in _STAGES:
        entries.add(stage, partial(_in_parallel, _commands(stage, check.folder, count)))


def _commands(stage: str, folder: Path, count: int) -> list[list[str]]:
    tool = str(Path(__file__).with_name("gpu_check.py"))
    command = [sys.executable, tool, "--stage", stage, "--folder", str(folder)]
    return [[*command, "--part", f"{index}/{count}"] for index in range(count)]


def _in_parallel(commands: Sequence[list[str]]) -> dict[str, Any]:
    """Run commands in parallel. A failure is no failure of this stage: the stage itself reports it later."""
    start = time.monotonic()
    processes = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]  # in this process's group, which is killed at the time-out
    num_failed = sum(process.wait() != 0 for process in processes)
    return {"num_processes": len(processes), "num_failed": num_failed, "seconds": time.monotonic() - start}
