"""From the start of a process to its first token: without kept weights, and with them (see octavo.models.packed_cache).

    python benchmarks/start.py                                   # qwen2-0.5b in int8 and in int4
    python benchmarks/start.py --model ./my-checkpoint --repeat 5

Files are in the page cache: each case runs once more than it is counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from octavo import LLM, SamplingParams
model, quantization, kept = sys.argv[1:]
llm = LLM(model, quantization=quantization, packed_cache_bytes=int(kept), skip_tokenizer_init=True)
llm.generate([[1] * 32], SamplingParams(max_tokens=1), use_tqdm=False)
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024)
"""


def start(model: str, quantization: str, kept: int, environment: dict[str, str]) -> tuple[float, int]:
    """Run one process; return its seconds and its peak memory in bytes."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, model, quantization, str(kept)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return time.perf_counter() - begin, int(result.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "qwen2-0.5b"), help="a checkpoint directory")
    parser.add_argument("--repeat", type=int, default=3, help="medians of so many runs")
    arguments = parser.parse_args()
    print("| weights | not kept | kept | peak memory, kept |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        for quantization in ("int8", "int4"):
            cells = [quantization]
            for kept in (0, 1 << 40):
                runs = [start(arguments.model, quantization, kept, environment) for _ in range(arguments.repeat + 1)]
                cells.append(f"{statistics.median(seconds for seconds, _ in runs[1:]):.1f} s")
            cells.append(f"{runs[-1][1] / 1e6:.0f} MB")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
