"""Memory of `LLM` and of `octavo serve`, compared with its parts: weights, KV and at most 400 MB.

    python benchmarks/memory.py                                  # qwen2-0.5b in three precisions: minutes
    python benchmarks/memory.py --precision int8 --way serve --kv-mib 512

Each process runs workloads A and B. RSS and its peak are VmRSS and VmHWM of /proc/PID/status. They include pages of
mapped files, so mapped packed weights count (as weights), and so do libraries. For `octavo serve` the HTTP process and
the engine process have a line each, and one line together, in which pages of shared libraries count once.

Bounds for `LLM`, and for a server's two processes together: the peak during loading is at most 1.3 times the RSS after
the workloads, and that RSS is at most weights + requested KV + 400 MB. Exits with status 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from serving import bench, free_port, running
from workloads import prepare

from octavo.models.registry import read_architecture
from octavo.models.weight_bytes import weight_bytes

PEAK_BOUND, REST_BYTES = 1.3, 400e6
PRECISIONS, WAYS = ("bf16", "int8", "int4"), ("LLM", "serve")
PROGRAM = """
import json, sys
from pathlib import Path
from octavo import LLM, SamplingParams

def status():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")]

model, quantization, kv_bytes, threads, workloads = json.loads(sys.argv[1])
llm = LLM(
    model, dtype="bfloat16", quantization=quantization, max_model_len=2048, max_num_seqs=64, num_threads=threads,
    kv_cache_memory_bytes=kv_bytes, skip_tokenizer_init=True,
)
loaded = status()
data = json.loads(Path(workloads).read_bytes())
for requests in [*([item] for item in data["A"]), data["B"]]:
    params = [SamplingParams(temperature=0.0, max_tokens=each["out"], ignore_eos=True) for each in requests]
    llm.generate([each["prompt"] for each in requests], params, use_tqdm=False)
print(json.dumps([*loaded, *status()]))
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process: the peak during loading, RSS after loading, RSS after the workloads, and its peak then."""

    load_peak: int
    loaded: int
    peak: int
    after: int

    def beside(self, other: Memory, shared_loaded: int, shared_after: int) -> Memory:
        """Return the sum for two processes. shared_loaded, shared_after: the bytes that both share, counted once."""
        return Memory(
            self.load_peak + other.load_peak - shared_loaded,
            self.loaded + other.loaded - shared_loaded,
            self.peak + other.peak - shared_after,
            self.after + other.after - shared_after,
        )

    def faults(self, weights: int, kv: int) -> list[str]:
        """Return the bounds that do not hold."""
        found = []
        if self.load_peak > PEAK_BOUND * self.after:
            found.append(f"peak at load {self.load_peak / self.after:.2f} times RSS after, of {PEAK_BOUND}")
        if self.after > weights + kv + REST_BYTES:
            beyond = self.after - weights - kv
            found.append(f"RSS after is weights + KV + {beyond / 1e6:.0f} MB, of {REST_BYTES / 1e6:.0f}")
        return found


def of_llm(model: Path, precision: str, kv_bytes: int, threads: int, workloads: Path) -> dict[str, Memory]:
    """Run `LLM` in a process; return its memory."""
    job = json.dumps([str(model), None if precision == "bf16" else precision, kv_bytes, threads, str(workloads)])
    result = subprocess.run([sys.executable, "-c", PROGRAM, job], stdout=subprocess.PIPE, text=True, check=True)
    load_peak, loaded, peak, after = json.loads(result.stdout.splitlines()[-1])
    return {"LLM": Memory(load_peak, loaded, peak, after)}


def of_server(model: Path, precision: str, kv_bytes: int, threads: int, workloads: Path) -> dict[str, Memory]:
    """Run `octavo serve`; return the memory of its processes, and of both together."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--num-threads", str(threads)]
    command += ["--kv-cache-memory-bytes", str(kv_bytes)]
    command += [] if precision == "bf16" else ["--quantization", precision]
    url = f"http://127.0.0.1:{port}"
    with running(command, dict(os.environ), f"{url}/ready") as (process, _):
        http = psutil.Process(process.pid)
        (engine,) = http.children(recursive=True)
        processes = {"serve, HTTP process": http, "serve, engine process": engine}
        loaded = {name: status(each.pid) for name, each in processes.items()}
        shared_loaded = shared_bytes(http, engine)
        for item in json.loads(workloads.read_bytes())["A"]:
            complete(url, item)
        bench(url, workloads)
        found = {name: Memory(*loaded[name], *status(each.pid)) for name, each in processes.items()}
        shared_after = shared_bytes(http, engine)
    first, second = found.values()
    return found | {"serve, both": first.beside(second, shared_loaded, shared_after)}


def status(pid: int) -> tuple[int, int]:
    """Return (VmHWM, VmRSS) of a process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    peak, now = (int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))
    return peak, now


def shared_bytes(one: psutil.Process, other: psutil.Process) -> int:
    """Return an upper bound of the bytes of mapped files that both processes share.

    (25.04 MB for a server; a comparison of page frames gave 24.98 MB.)
    """
    first, second = (
        {each.path: each.shared_clean for each in process.memory_maps() if each.path.startswith("/")}
        for process in (one, other)
    )
    return sum(min(first[path], second[path]) for path in first.keys() & second.keys())


def complete(url: str, request: dict[str, Any]) -> None:
    """Send one request, and wait for its answer."""
    body = {"prompt": request["prompt"], "max_tokens": request["out"], "temperature": 0.0, "ignore_eos": True}
    message = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(message) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == request["out"]


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: qwen2-0.5b, made if missing)")
    parser.add_argument(
        "--workloads", type=Path, help="as make_workloads.py writes them (default: those of compare.py)"
    )
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="again for more (default: all)")
    parser.add_argument("--way", action="append", choices=WAYS, help="again for both (default: both)")
    parser.add_argument("--kv-mib", type=int, default=256, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the engine (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.model is None or arguments.workloads is None:
        model, workloads = prepare("qwen2-0.5b")
        arguments.model, arguments.workloads = arguments.model or model, arguments.workloads or workloads
    architecture, kv = read_architecture(arguments.model), arguments.kv_mib << 20
    heads = "weights", "process", "bytes of weights", "peak at load", "loaded", "after", "peak", "weights + KV + 400"
    print("MB\n\n| " + " | ".join((*heads, "peak at load / after")) + " |\n" + "|---" * (len(heads) + 1) + "|")
    faults = []
    for precision in arguments.precision or PRECISIONS:
        weights = weight_bytes(architecture, "bfloat16", quantization=None if precision == "bf16" else precision)
        for way in arguments.way or WAYS:
            measure = of_llm if way == "LLM" else of_server
            found = measure(arguments.model, precision, kv, arguments.threads, arguments.workloads)
            for name, memory in found.items():
                is_part = name.endswith("process")  # bounds apply to the sum
                sizes = (weights, memory.load_peak, memory.loaded, memory.after, memory.peak)
                cells = [precision, name, *(f"{size / 1e6:.0f}" for size in sizes)]
                bound = "" if is_part else f"{(weights + kv + REST_BYTES) / 1e6:.0f}"
                print("| " + " | ".join([*cells, bound, f"{memory.load_peak / memory.after:.2f}"]) + " |", flush=True)
                if not is_part:
                    faults += [f"{precision}, {name}: {fault}" for fault in memory.faults(weights, kv)]
    print("\n" + ("\n".join(f"beyond its bound: {fault}" for fault in faults) or "all within their bounds"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
