"""The example runs as its text says, on the built-in model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_compare_sequential_prints_all_three_ways():
    command = [sys.executable, str(EXAMPLES / "batch_inference.py"), "--num-prompts", "4", "--max-tokens", "8"]
    done = subprocess.run([*command, "--compare-sequential"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    for name in ("sequential", "static", "continuous"):
        assert f"\n{name} " in done.stdout


def test_step_by_step_prints_all_seven_stages():
    command = [sys.executable, str(EXAMPLES / "step_by_step.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    for stage in ("schedule", "inputs", "execute", "sample", "update", "detokenize", "free"):
        assert stage in done.stdout
