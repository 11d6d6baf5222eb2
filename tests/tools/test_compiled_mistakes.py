"""Mistakes that only a compiler shows, because the interpreter computes right results with them, are found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
MISTAKES = {  # target, module, old text, new text, case
    "offsets of 64 bits: blocks of KV": (
        *("sm_90", "attention", "mask=is_there, other=0).to(tl.int64)", "mask=is_there, other=0)"),
        "attention bfloat16 64",
    ),
    "offsets of 64 bits: rows of logits": (
        *("sm_90", "matmul", "out_ptr + row.to(tl.int64)[:, None]", "out_ptr + row[:, None]"),
        "linear bfloat16 256 rows",
    ),
    "offsets of 64 bits: partial sums": (
        *("sm_90", "matmul", "(partition.to(tl.int64) * num_rows + row)", "(partition * num_rows + row)"),
        "linear bfloat16 1 row",
    ),
    "without a barrier": ("sm_90", "norms", "        tl.debug_barrier()", "        pass", "add_rms_norm bfloat16 4096"),
    "enable_fp_fusion": (
        *("sm_90", "norms", "enable_fp_fusion=False", "enable_fp_fusion=True"),
        "add_rms_norm bfloat16 4096",
    ),
    "multiplies by": ("sm_90", "matmul", '"BLOCK_N": BLOCK_N', '"BLOCK_N": BLOCK_N // 2', "linear bfloat16 1 row"),
    "rounded to tf32": ("sm_80", "rounding", '"tf32x3"', '"tf32"', "attention float32 64"),
    "without a fence": ("sm_90", "proxy_fences", "needs_fence = True", "needs_fence = False", "linear int8 1 row"),
}
SCRIPT = """if True:
    import importlib, json, pathlib, sys
    from broken_kernels import broken
    import compile_kernels
    directory, mistakes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    bounds, reports = compile_kernels.read_bounds(), {}
    for number, (label, (target, module, old, new, case)) in enumerate(mistakes.items()):
        (directory / str(number)).mkdir()
        users = ["attention"] if module == "rounding" else []
        made = broken(directory / str(number), module, old, new, *users)
        right = importlib.import_module(f"octavo.kernels.triton.{[module, *users][-1]}")
        names = [name for name, each in vars(made).items() if getattr(each, "__module__", None) == made.__name__]
        kept = {name: getattr(right, name) for name in names}
        vars(right).update({name: getattr(made, name) for name in names})
        found = reports[label] = []
        for name, kernel in compile_kernels.compiled(case, target).items():
            vars(right).update(kept)
            taken = compile_kernels.taken(case, name, target, kernel)
            found += compile_kernels.faults(kernel, rereads=case in compile_kernels.REREADING)
            found += compile_kernels.exceeded(taken, bounds)
    print(json.dumps(reports))
    """


@pytest.mark.slow
def test_each_mistake_in_compiled_kernel_is_found(tmp_path):
    """In one process of its own, because it compiles and this one interprets."""
    paths = [ROOT / "tools", ROOT / "tests", ROOT / "tests" / "kernels" / "triton"]
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path, json.dumps(MISTAKES)],
        env={**os.environ, **environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    missed = {
        label: found for label, found in reports.items() if not any(label.split(":")[0] in problem for problem in found)
    }
    assert set(reports) == set(MISTAKES)
    assert missed == {}
