"""The roofline's table of a report of `octavo doctor`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "roofline.py"
LIMITS = {"flops": 1e11, "byte_ops": 8e12, "bfloat16_flops": 4e12, "bytes_read": 1e10}
REPORT = {
    "processor": "P", "isa": "amx", "num_threads": 2, "limits": LIMITS,
    "products": [
        {"name": "o", "in_features": 1000, "out_features": 1000, "precision": "int8", "rows": 1, "seconds": 2e-4,
         "ops_per_s": 1e10, "num_bytes": 1_000_000},
        {"name": "o", "in_features": 1000, "out_features": 1000, "precision": "bfloat16", "rows": 2000,
         "seconds": 2e-3, "ops_per_s": 2e12, "num_bytes": 2_000_000},
    ],
    "attention": [
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "kv": "bfloat16", "rows": 1, "positions": 1000,
         "seconds": 1e-4, "ops_per_s": 2.048e10, "num_bytes": 512_000},
    ],
}  # fmt: skip


def run(path):
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)


def test_table_has_bounds_and_shares(tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(REPORT))
    lines = run(path).stdout.splitlines()
    assert lines[0] == "P, amx, 2 threads: 4.00 T/s bfloat16, 8.00 T/s int8, 10.0 GB/s read"
    assert lines[4:] == [
        "| int8 | o 1000 x 1000 | 1 | 2 | memory | 100 us | 200 us | 0.50 |",
        "| bfloat16 | o 1000 x 1000 | 2000 | 2e+03 | arithmetic | 1 ms | 2 ms | 0.50 |",
        "| attention, KV in bfloat16 | 8 x 64, 2 KV heads, 1000 positions | 1 | 4 | memory | 51.2 us | 100 us | 0.51 |",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"limits": {}, "products": [{}]}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "doctor.json"
    path.write_text(text)
    ended = run(path)
    assert ended.returncode == 2
    assert "is no output of `octavo doctor --json`" in ended.stderr
    assert "Traceback" not in ended.stderr
