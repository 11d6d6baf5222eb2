"""Write the workloads A to D as token ids.

    python benchmarks/make_workloads.py OUT.json [--seed 1234]

A: four single streams. B: 64 requests, prompt and output lengths lognormal (sigma 0.8). C: prompts of 1,024 tokens.
D: two sets of 32 requests that share a prefix of 512 tokens. E_gaps: unit-rate Poisson gaps for sending B over time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

LOW_ID, HIGH_ID = 300, 32_000
SIGMA = 0.8


def make_workloads(seed: int) -> dict[str, Any]:
    """Draw all workloads; the order of the draws is part of the format, so that a seed always means the same."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        drawn: list[int] = rng.integers(LOW_ID, HIGH_ID, count).tolist()
        return drawn

    def lengths(mean: float, low: int, high: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 64)
        return [int(length) for length in np.clip(np.round(drawn), low, high)]

    prompts, outputs = lengths(131, 16, 512), lengths(54, 8, 192)
    workloads: dict[str, Any] = {
        "A": [{"prompt": ids(32), "out": 64} for _ in range(4)],
        "B": [{"prompt": ids(prompt), "out": out} for prompt, out in zip(prompts, outputs, strict=True)],
        "C": [{"prompt": ids(1024), "out": 1} for _ in range(4)],
        "D": [],
    }
    for _ in range(2):
        prefix = ids(512)
        workloads["D"].append([{"prompt": prefix + ids(32), "out": 32} for _ in range(32)])
    workloads["E_gaps"] = rng.exponential(1.0, 64).tolist()
    return workloads


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(make_workloads(arguments.seed)))


if __name__ == "__main__":
    main()
