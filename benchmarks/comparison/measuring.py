"""One job of one engine in a process of its own, and the memory of all its processes; the limits of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "runners"))
from protocol import Job

from comparison.engines import RUNNERS

if TYPE_CHECKING:
    from comparison.engines import Engine

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_LIMITS = """
import dataclasses, json, sys
from octavo.kernels.cpu import CpuKernels
print(json.dumps(dataclasses.asdict(CpuKernels(num_threads=int(sys.argv[1])).measure_limits())))
"""


class RunError(Exception):
    """A runner failed; its last words are the message."""


def measure(
    engine: Engine, checkpoint: Path, precision: str, only: str, *, caching: bool, workloads: Path, threads: int,
    kv_bytes: int, timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Run one job. Returns what the runner wrote, and "peak_bytes": memory of all its processes, shared pages once.

    A job that fails or takes too long keeps what it got through. Raises `RunError` if that is nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        job = Job(
            checkpoint=str(checkpoint),
            quantization=engine.quantization(precision),
            workloads=str(workloads),
            only=only,
            prefix_caching=caching,
            threads=threads,
            kv_bytes=kv_bytes,
            max_model_len=2048,
            started_at=time.time(),
            result=str(result),
            binary=engine.binary,
        )
        command = [engine.python, str(RUNNERS / engine.runner), json.dumps(asdict(job))]
        with log.open("wb") as words:
            process = subprocess.Popen(
                command,
                stdout=words,
                stderr=words,
                env=engine.environment(threads, kv_bytes),
                cwd=folder,
                start_new_session=True,
            )
            watch = _MemoryWatch(process.pid)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                words.write(f"it did not end within {timeout_s:.0f} s".encode())
            finally:
                peak = watch.stop()
                _end_group(process)
        if not result.exists():
            raise RunError(log.read_text(errors="replace")[-3000:])
        return json.loads(result.read_bytes()) | {"peak_bytes": peak}


def measure_limits(threads: int) -> dict[str, float]:
    """Return {"flops", "byte_ops", "bfloat16_flops", "bytes_read"} a second, as `octavo doctor` measures them."""
    result = subprocess.run([sys.executable, "-c", _LIMITS, str(threads)], capture_output=True, text=True, check=True)
    limits: dict[str, float] = json.loads(result.stdout)
    return limits


class _MemoryWatch:
    """The largest memory of a process and all its children; pages that they share count once.

    A look walks the page tables of them all, so they become rarer, not to slow down what is measured; what one process
    held at most, the system remembers itself.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._is_over = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while not self._is_over.wait(pause_s):
            pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
            held = [_memory(process) for process in _tree(self._pid)]
            together = sum(own for own, _, _ in held) + max((shared for _, shared, _ in held), default=0)
            self._peak = max(self._peak, together, *(most for _, _, most in held))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory(process: psutil.Process) -> tuple[int, int, int]:
    """Return a process's own bytes, those that others map as well, and the most it ever held."""
    try:
        info = process.memory_full_info()
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except (psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
        return 0, 0, 0
    peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return int(info.uss), int(info.rss - info.uss), peak


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever the runner started, and itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
