"""Triton kernels compile for GPUs that this machine lacks, within the resources of their table."""

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from compile_kernels import CASES, TARGETS, Taken, exceeded, read_bounds  # noqa: E402


def compile_kernels(*options):
    """Run the tool in a process of its own, because Triton only interprets in this one."""
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "compile_kernels.py", *options],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def test_sample_of_kernels_compiles_for_random_target():
    """A random target and two cases; the test of all kernels for all targets is `slow`."""
    target = random.Random(os.environ["OCTAVO_SWEEP_SEED"]).choice(list(TARGETS))
    result = compile_kernels("--target", target, "--case", "attention bfloat16 128", "--case", "rope_kv")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels_compile_for_every_target(target):
    result = compile_kernels("--target", target)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_kernel_has_bounds_for_every_target():
    sources = (ROOT / "src" / "octavo" / "kernels" / "triton").glob("*.py")
    launched = {name for path in sources for name in re.findall(r"^ +(_\w+)\[", path.read_text("utf-8"), re.MULTILINE)}
    assert {"_attend", "_merge_partitions", "_rope_and_write_kv"} <= launched
    bounds = read_bounds()
    assert {(kernel, target) for _, kernel, target in bounds} >= {(name, t) for name in launched for t in TARGETS}
    assert {case for case, _, _ in bounds} == set(CASES)


@pytest.mark.parametrize(
    ("field", "more", "is_allowed"),
    [("registers", 8, True), ("registers", 9, False), ("spilled_bytes", 4, False), ("shared_bytes", 1, False)],
)
def test_kernel_resources_above_bound_are_reported(field, more, is_allowed):
    bound = Taken("case", "kernel", "sm_90", 64, 0, 1024)
    taken = replace(bound, **{field: getattr(bound, field) + more})
    assert (exceeded(taken, {bound.key: bound}) == []) == is_allowed


def test_hardware_limit_and_missing_bound_are_reported():
    taken = Taken("case", "kernel", "gfx942", 64, 0, 65537)
    (problem,) = exceeded(taken, {taken.key: taken})
    assert "65537 shared bytes, at most 65536" in problem
    (problem,) = exceeded(taken, {})
    assert "has no bound" in problem


@pytest.mark.slow
def test_matmul_kernels_use_same_wgmma_instruction_for_any_row_count():
    """A partition's product is the same machine instruction in both kernels that compute it."""
    script = """if True:
        import re, sys
        import compile_kernels
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction
        run, found = JITFunction.run, {}
        def compile_only(self, *args, grid, warmup, **options):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            found[self.fn.__name__] = set(re.findall(r"wgmma.mma_async\\S*", kernel.asm["ptx"]))
        driver.set_active(compile_kernels.NoDevice("sm_90"))
        JITFunction.run = compile_only
        for case in ("linear bfloat16 256 rows", "linear bfloat16 1 row"):
            compile_kernels.CASES[case]()
        assert found["_matmul"] == found["_multiply_partition"] and len(found["_matmul"]) == 1, found
        """
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "tools", env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
