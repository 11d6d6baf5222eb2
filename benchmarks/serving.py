"""Workload E, and B through HTTP: compare octavo's server with vLLM's, in turns, each in a fresh process.

    python benchmarks/serving.py                               # bf16 and int8, 3 rounds at 1.4 requests a second
    python benchmarks/serving.py --precision int8 --rate 2 --engine octavo
    python benchmarks/serving.py --pairs 5                     # the time between steps, through HTTP and without it

Servers and `octavo bench serve` run at the same priority. --home is that of compare.py: missing environments and
checkpoints are created there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.engines import ENGINES, Engine
from workloads import FOLDER, prepare

from octavo.config import CPU_DEFAULTS, DEFAULT_MIXED_STEP_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S = 300.0
THREADS = 2  # of every engine
FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "wall_s", "output_tok_per_s")


def command_of(engine: Engine, checkpoint: Path, precision: str, port: int, kv_gib: int) -> list[str]:
    """Return the command that starts a server."""
    shared = ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64"]
    if engine.name == "octavo":
        rounded = [] if precision == "bf16" else ["--quantization", precision]
        memory = ["--kv-cache-memory-bytes", f"{kv_gib}G"]
        return [engine.python, "-m", "octavo", "serve", str(checkpoint), *shared, *rounded, *memory]
    module = "vllm.entrypoints.openai.api_server"
    return [engine.python, "-m", module, "--model", str(checkpoint), "--dtype", "bfloat16", *shared]


@contextlib.contextmanager
def served(engine: Engine, checkpoint: Path, precision: str, kv_gib: int) -> Iterator[tuple[str, float]]:
    """Run a server during the context; yield its address and the seconds until it answered."""
    port = free_port()
    command = command_of(engine, checkpoint, precision, port, kv_gib)
    url = f"http://127.0.0.1:{port}"
    with running(command, engine.environment(THREADS, kv_gib << 30), f"{url}/v1/models") as (_, start_s):
        yield url, start_s


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(
    command: list[str], environment: dict[str, str], address: str
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Run a server during the context; yield its process and the seconds until GET `address` answered with 200."""
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            while not _answers(address):
                if process.poll() is not None or time.monotonic() - start > READY_S:
                    log.seek(0)
                    words = log.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(f"{' '.join(command)} does not start: {words}")
                time.sleep(0.02)
            yield process, time.monotonic() - start
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def bench(url: str, workloads: Path, *options: str) -> dict[str, Any]:
    """Send workload B to a server; return the row of figures."""
    command = [sys.executable, "-m", "octavo", "bench", "serve", url, "--workload", str(workloads), "--json", *options]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(result.stdout)["results"][0]
    return row


def num_steps(url: str) -> int:
    """Return the number of steps of octavo's engine, from its metrics."""
    time.sleep(1.0)  # the metrics are up to half a second old
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.search(r"^octavo:iteration_tokens_total_count\{[^}]*\} (\S+)", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def run_rounds(arguments: argparse.Namespace, engines: list[Engine], source: Path, workloads: Path) -> None:
    """Measure E and B in turns; print medians of all rounds."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for precision in arguments.precision:
            for engine in engines if number % 2 == 0 else engines[::-1]:
                checkpoint = engine.checkpoint(source, precision)
                with served(engine, checkpoint, precision, arguments.kv_gib) as (url, start_s):
                    bench(url, workloads, "--num-prompts", "16")  # the first requests of a process are slow
                    for title, options in ((f"E at {arguments.rate:g}/s", ["--rate", str(arguments.rate)]), ("B", [])):
                        row = {**bench(url, workloads, *options), "start_s": round(start_s, 2)}
                        rows.setdefault((title, precision, engine.name), []).append(row)
                        print(json.dumps({"round": number, "workload": title, "precision": precision,
                                          "engine": engine.name, **row}), flush=True)  # fmt: skip
    print("\n| workload | precision | engine | runs | " + " | ".join(FIGURES) + " | start s |")
    print("|---" * (len(FIGURES) + 5) + "|")
    for (title, precision, name), runs in sorted(rows.items()):
        figures = [statistics.median(run[figure] for run in runs) for figure in (*FIGURES, "start_s")]
        cells = [title, precision, name, str(len(runs)), *(f"{each:.5g}" for each in figures)]
        print("| " + " | ".join(cells) + " |")


def run_pairs(arguments: argparse.Namespace, octavo: Engine, checkpoint: Path, workloads: Path) -> None:
    """Measure the mean time between steps of B through HTTP, and without it, in turns."""
    for precision in arguments.precision:
        ratios = []
        rounded = [] if precision == "bf16" else ["--quantization", precision]
        limits = ["--max-model-len", "2048", "--max-num-seqs", "64", "--kv-cache-memory-bytes", f"{arguments.kv_gib}G"]
        offline = [sys.executable, "-m", "octavo", "bench", "throughput", str(checkpoint), *rounded, *limits]
        offline += ["--workload", str(workloads), "--only", "B", "--repeat", "1", "--json"]
        # Use the server's limit of tokens per step; otherwise steps of different sizes would be compared.
        offline += ["--mixed-step-ms", f"{DEFAULT_MIXED_STEP_MS:g}"]
        offline += ["--max-num-batched-tokens", str(CPU_DEFAULTS.max_num_batched_tokens)]
        environment = octavo.environment(THREADS, arguments.kv_gib << 30)
        for number in range(arguments.pairs):
            result = subprocess.run(
                offline, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
            )
            plain = json.loads(result.stdout)["results"][0]
            with served(octavo, checkpoint, precision, arguments.kv_gib) as (url, _):
                bench(url, workloads, "--num-prompts", "4")
                before = num_steps(url)
                row = bench(url, workloads)
                steps = num_steps(url) - before
            each, through = plain["wall_s"] / plain["steps"], row["wall_s"] / steps
            ratios.append(through / each)
            figures = f"{1000 * each:.2f} ms a step offline ({plain['steps']:.0f} steps), "
            figures += f"{1000 * through:.2f} ms through HTTP ({steps} steps): {through / each:.4f}"
            print(f"{precision} pair {number}: {figures}", flush=True)
        print(f"{precision}: median ratio {statistics.median(ratios):.4f} of {len(ratios)} pairs", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b", help="of tools/make_checkpoint.py (default: %(default)s)")
    parser.add_argument("--engine", action="append", choices=("octavo", "vllm"), help="again for more (default: both)")
    parser.add_argument("--precision", action="append", choices=("bf16", "int8"), help="again for more (both)")
    parser.add_argument("--rate", type=float, default=1.4, help="requests a second of E (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=0, help="measure time between steps instead, so many pairs")
    parser.add_argument("--kv-gib", type=int, default=3, help="of every engine's KV cache (default: %(default)s)")
    parser.add_argument("--home", type=Path, default=FOLDER / "compare", help="environments (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.precision = arguments.precision or ["bf16", "int8"]
    source, workloads = prepare(arguments.shape)
    arguments.home.mkdir(parents=True, exist_ok=True)
    known = {kind.name: kind(arguments.home.resolve()) for kind in ENGINES}
    if arguments.pairs:
        run_pairs(arguments, known["octavo"], source, workloads)
        return
    engines = [known[name] for name in arguments.engine or ("octavo", "vllm")]
    for engine in engines:
        engine.install()
    run_rounds(arguments, engines, source, workloads)


if __name__ == "__main__":
    main()
