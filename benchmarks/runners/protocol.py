"""What every runner does with its engine: load it, run the workloads, write what it saw. Standard library only.

A runner is a script for the environment of one engine. It is started with a job as JSON (see `Job`) and hands `run` a
function that opens the engine: an object with `generate`, which answers requests that come at the same moment, greedily
and each to its exact length, and returns how many tokens each of them got. A job in turns keeps the engine loaded and
measures one figure whenever it is told to; until then the engine has nothing to do.
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
    """Token ids of the prompt, and exactly how many tokens it gets."""

    prompt: list[int]
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    checkpoint      in the engine's own format
    quantization    int8 or int4 where the engine rounds a plain checkpoint itself; else None
    only            letters of the workloads; D is run with or without the prefix cache, as prefix_caching says
    prefix_caching  of the engine
    kv_bytes        for its KV cache, where the engine lets one say so
    started_at      seconds since the epoch when the process was asked for
    binary          the engine's program, if it is one
    speculation     how octavo guesses tokens; None for its default
    turns           file descriptor of a socket that says when to measure what (see `_take_turns`), if not all at once
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


class Engine(Protocol):
    """An engine that is ready."""

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer requests that come at once; return the numbers of tokens."""
        ...


def has_bf16() -> bool:
    """Whether the processor multiplies bf16; where it does not, engines simulate it, far slower than float32."""
    return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def run(open_engine: Callable[[Job], Engine]) -> None:
    """Run the job of the command line; write {"start_s", "A", "B", "C", "D"} to its result file, each when it is there.

    A: decode tokens/s of each stream. B, D: wall seconds of each set. C: prompt tokens/s of each prompt.
    """
    job = Job(**json.loads(sys.argv[1]))
    data = json.loads(Path(job.workloads).read_bytes())
    engine = open_engine(job)
    _timed(engine, [Request(prompt=list(range(1000, 1032)), out=1)])
    result: dict[str, Any] = {"start_s": time.time() - job.started_at}
    _timed(engine, [Request(**item) for item in data["D"][-1][:8]])  # first steps are slow: shapes are compiled, say
    sets = _sets(data)
    if job.turns is not None:
        _take_turns(engine, sets, socket.socket(fileno=job.turns))
        return
    for letter in job.only:
        result[letter] = [_figure(engine, letter, requests) for requests in sets[letter]]
        Path(job.result).write_text(json.dumps(result))


def _sets(data: dict[str, Any]) -> dict[str, list[list[Request]]]:
    """Return of each workload what is asked for at once; each gives a figure."""

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
    """Say that the engine is ready, then answer lines [letter, number of the turn] with a figure, until they end.

    Every turn has other token ids, so that a prefix cache holds nothing of an earlier one; of one turn they are the
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
    """Return a request with other token ids of the same prompt in each lap: what it shared, it shares."""
    return Request(prompt=[token ^ lap for token in request.prompt], out=request.out)


def _timed(engine: Engine, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    counts = engine.generate(requests)
    seconds = time.perf_counter() - start
    if counts != [request.out for request in requests]:
        raise RuntimeError(f"the engine gave {counts} tokens where {[request.out for request in requests]} were asked")
    return seconds


def _decode_rate(engine: Engine, request: Request) -> float:
    """Tokens/s behind the first: the time of the whole answer less that of its first token, asked for alone."""
    first = _timed(engine, [Request(prompt=request.prompt[::-1], out=1)])  # another prompt: no cache has it
    return (request.out - 1) / (_timed(engine, [request]) - first)
