"""Shared code of all runners: load the engine, run the workloads, write the results. Standard library only.

A runner is a script for the environment of one engine. It is started with a job as JSON (see `Job`) and passes to `run`
a function that opens the engine: an object with `generate`, which answers simultaneous requests greedily, each to its
exact length, and returns the number of tokens of each. A job in turns keeps the engine loaded and measures one figure
on each request; between these the engine is idle.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request: token ids of the prompt, and the exact number of output tokens."""

    prompt: list[int]
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a runner.

    checkpoint      in the engine's own format
    quantization    int8 or int4 if the engine itself quantizes a plain checkpoint; otherwise None
    only            letters of the workloads; D is run with or without the prefix cache, depending on prefix_caching
    prefix_caching  of the engine
    kv_bytes        for its KV cache, if the engine has such an option
    started_at      seconds since the epoch at which the process was started
    binary          the engine's program, if it is not a Python package
    speculation     how octavo guesses tokens; None for its default
    turns           file descriptor of a socket that requests measurements (see `_take_turns`); None to run all of them
    ranks           processes that compute the model together; each has its part of the threads and of kv_bytes
    """

    checkpoint: str
    quantization: str | None
    workloads: str
    only: str
    prefix_caching: bool
    threads: int
    kv_bytes: int
    max_model_len: int
    started_at: float
    result: str
    binary: str | None = None
    speculation: str | None = None
    turns: int | None = None
    ranks: int = 1


class Engine(Protocol):
    """A loaded engine."""

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer simultaneous requests; return the numbers of tokens."""
        ...


def has_bf16() -> bool:
    """Return True if the processor multiplies bf16. Otherwise engines emulate it, far slower than float32."""
    return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def run(open_engine: Callable[[Job], Engine]) -> None:
    """Run the job of the command line; write {"start_s", "A", "B", "C", "D"} to its result file, as they are measured.

    A: decode tokens/s of each stream. B, D: wall seconds of each set. C: prompt tokens/s of each prompt.
    """
    job = Job(**json.loads(sys.argv[1]))
    data = json.loads(Path(job.workloads).read_bytes())
    engine = open_engine(job)
    _timed(engine, [Request(prompt=list(range(1000, 1032)), out=1)])
    result: dict[str, Any] = {"start_s": time.time() - job.started_at}
    _timed(engine, [Request(**item) for item in data["D"][-1][:8]])  # warm-up: some engines compile shapes
    sets = _sets(data)
    if job.turns is not None:
        _take_turns(engine, sets, socket.socket(fileno=job.turns))
        return
    for letter in job.only:
        result[letter] = [_figure(engine, letter, requests) for requests in sets[letter]]
        Path(job.result).write_text(json.dumps(result))


def _sets(data: dict[str, Any]) -> dict[str, list[list[Request]]]:
    """Return for each workload its sets of simultaneous requests; each set gives one figure."""

    def read(items: list[dict[str, Any]]) -> list[Request]:
        return [Request(**item) for item in items]

    return {
        "A": [read([item]) for item in data["A"]],
        "B": [read(data["B"])],
        "C": [read([item]) for item in data["C"]],
        "D": [read(data["D"][0])],
    }


def _figure(engine: Engine, letter: str, requests: list[Request]) -> float:
    """Return A's decode tokens/s, C's prompt tokens/s, or the wall seconds of B or D."""
    if letter == "A":
        return _decode_rate(engine, requests[0])
    seconds = _timed(engine, requests)
    return len(requests[0].prompt) / seconds if letter == "C" else seconds


def _take_turns(engine: Engine, sets: dict[str, list[list[Request]]], channel: socket.socket) -> None:
    """Report that the engine is ready, then answer each line [letter, number of the turn] with a figure, until the end.

    Every turn has other token ids, so that a prefix cache has no hits from an earlier turn. In one turn they are the
    same for every engine.
    """
    with channel, channel.makefile("r") as turns, channel.makefile("w") as answers:
        print("ready", file=answers, flush=True)
        for turn in turns:
            letter, number = json.loads(turn)
            lap, which = divmod(number, len(sets[letter]))
            requests = [_renamed(request, lap) for request in sets[letter][which]]
            print(json.dumps(_figure(engine, letter, requests)), file=answers, flush=True)


def _renamed(request: Request, lap: int) -> Request:
    """Return a request with the token ids of its prompt changed for each lap; shared prefixes stay shared."""
    return Request(prompt=[token ^ lap for token in request.prompt], out=request.out)


def _timed(engine: Engine, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    counts = engine.generate(requests)
    seconds = time.perf_counter() - start
    if counts != [request.out for request in requests]:
        raise RuntimeError(f"the engine gave {counts} tokens where {[request.out for request in requests]} were asked")
    return seconds


def _decode_rate(engine: Engine, request: Request) -> float:
    """Return tokens/s after the first: from the time of the whole answer minus that of a one-token answer."""
    first = _timed(engine, [Request(prompt=request.prompt[::-1], out=1)])  # another prompt, so that it is not cached
    return (request.out - 1) / (_timed(engine, [request]) - first)
