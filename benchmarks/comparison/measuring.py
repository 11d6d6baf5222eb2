"""Run a job of one engine in a process of its own, as a whole or in turns; measure memory and the machine's limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

sys.path.append(str(Path(__file__).parents[1] / "runners"))
from protocol import Job

from comparison.engines import RUNNERS

if TYPE_CHECKING:
    from comparison.engines import Engine

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_LAST_WORDS_S = 10
_LIMITS = """
import dataclasses, json, sys
from octavo.kernels.cpu import CpuKernels
print(json.dumps(dataclasses.asdict(CpuKernels(num_threads=int(sys.argv[1])).measure_limits())))
"""


class RunError(Exception):
    """A runner failed. The message is the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The common setting of all engines: requests, threads, bytes for KV, the time limit of a job, and ranks."""

    workloads: Path
    threads: int
    kv_bytes: int
    timeout_s: float
    ranks: int = 1


def measure(
    engine: Engine, checkpoint: Path, precision: str, only: str, *, caching: bool, setting: Setting
) -> dict[str, Any]:
    """Run one job. Returns the runner's result and "peak_bytes": memory of all its processes, shared pages once.

    A job that fails or takes too long keeps the results so far. Raises `RunError` if there are none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _job(engine, checkpoint, precision, only, caching, setting, folder)
        process = _start(engine, job, setting, folder)
        watch = _MemoryWatch(process.pid)
        too_long = ""
        try:
            process.wait(setting.timeout_s)
        except subprocess.TimeoutExpired:
            too_long = f"it did not end within {setting.timeout_s:.0f} s"
        finally:
            peak = watch.stop()
            _end_group(process)
        if not Path(job.result).exists():
            raise RunError(_last_words(folder) + too_long)
        return json.loads(Path(job.result).read_bytes()) | {"peak_bytes": peak}


class Seat:
    """An engine that stays loaded and measures one figure in each of its turns."""

    def __init__(
        self, engine: Engine, checkpoint: Path, precision: str, only: str, *, caching: bool, setting: Setting
    ) -> None:
        """Start the engine and wait until it has answered a warm-up. Raises `RunError` if it fails."""
        with contextlib.ExitStack() as opened:
            self._folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            self._channel, theirs = socket.socketpair()
            opened.enter_context(self._channel)
            self._channel.settimeout(setting.timeout_s)
            with theirs:
                job = _job(engine, checkpoint, precision, only, caching, setting, self._folder, theirs.fileno())
                self._process = _start(engine, job, setting, self._folder)
            opened.callback(_end_group, self._process)
            self._answers = opened.enter_context(self._channel.makefile("r"))
            self._hear()
            self._opened = opened.pop_all()

    def figure(self, letter: str, number: int) -> float:
        """Measure the figure of a workload in turn `number`. Raises `RunError` if the engine fails."""
        try:
            self._channel.sendall(f"{json.dumps([letter, number])}\n".encode())
        except OSError as error:
            raise self._is_gone() from error
        return float(json.loads(self._hear()))

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its processes so far."""
        return sum(_cpu_times(process) for process in _tree(self._process.pid))

    def close(self) -> None:
        """End the engine if it still runs."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> str:
        try:
            line = self._answers.readline()
        except TimeoutError as error:
            raise RunError(
                f"{_last_words(self._folder)}it took longer than {self._channel.gettimeout():.0f} s"
            ) from error
        if not line:
            raise self._is_gone()
        return line

    def _is_gone(self) -> RunError:
        """Return the error with the end of its output, which may arrive after its socket is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        return RunError(_last_words(self._folder))


def _job(
    engine: Engine, checkpoint: Path, precision: str, only: str, caching: bool, setting: Setting, folder: Path,
    turns: int | None = None,
) -> Job:  # fmt: skip
    return Job(
        checkpoint=str(checkpoint),
        quantization=engine.quantization(precision),
        workloads=str(setting.workloads),
        only=only,
        prefix_caching=caching,
        threads=setting.threads,
        kv_bytes=setting.kv_bytes,
        max_model_len=2048,
        started_at=time.time(),
        result=str(folder / "result.json"),
        binary=engine.binary,
        speculation=engine.speculation,
        turns=turns,
        ranks=setting.ranks,
    )


def _start(engine: Engine, job: Job, setting: Setting, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as words:
        return subprocess.Popen(
            [engine.python, str(RUNNERS / engine.runner), json.dumps(asdict(job))],
            stdout=words,
            stderr=words,
            env=engine.environment(setting.threads, setting.kv_bytes, setting.ranks),
            cwd=folder,
            start_new_session=True,
            pass_fds=() if job.turns is None else (job.turns,),
        )


def _last_words(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-3000:]


def measure_limits(threads: int) -> dict[str, float]:
    """Return {"flops", "byte_ops", "bfloat16_flops", "bytes_read"} per second, measured as in `octavo doctor`."""
    result = subprocess.run([sys.executable, "-c", _LIMITS, str(threads)], capture_output=True, text=True, check=True)
    limits: dict[str, float] = json.loads(result.stdout)
    return limits


class _MemoryWatch:
    """Watches the peak memory of a process and all its children; shared pages count once.

    A look walks all their page tables, so looks become rarer over time, in order not to slow down the measurement. The
    peak of a single process is recorded by the system.
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


def _cpu_times(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0.0
    return float(times.user + times.system)


def _memory(process: psutil.Process) -> tuple[int, int, int]:
    """Return a process's private bytes, its shared bytes, and its peak."""
    try:
        info = process.memory_full_info()
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except (psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
        return 0, 0, 0
    peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return int(info.uss), int(info.rss - info.uss), peak


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the runner and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
