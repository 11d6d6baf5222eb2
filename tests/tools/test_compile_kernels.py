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
from compile_kernels import BOUNDS, CASES, TARGETS, Taken, exceeded, read_bounds  # noqa: E402

TABLES = sorted(BOUNDS.glob("*.csv"))

OTHER_KINDS = sorted({name.partition(" ")[0] for name in CASES} - {"attention", "linear"})


def compile_kernels(*options):
    """Run the tool in a process of its own, because Triton only interprets in this one."""
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "compile_kernels.py", *options],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.turn(12)
def test_sample_of_kernels_compiles_for_random_target():
    """A random target and a few cases; the test of all kernels for all targets is `slow`."""
    target = random.Random(os.environ["OCTAVO_SWEEP_SEED"]).choice(list(TARGETS))
    cases = ("attention bfloat16 64", "linear bfloat16 1", "rope_kv bfloat16 128 int8", "add_rms_norm")
    result = compile_kernels("--target", target, *(part for case in cases for part in ("--case", case)))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["attention"], ["linear"], OTHER_KINDS], ids=["attention", "linear", "others"])
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels_compile_for_every_target(target, kinds):
    result = compile_kernels("--target", target, *(f"--case={kind}" for kind in kinds))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_every_kernel_has_bounds_for_every_target(table):
    sources = (ROOT / "src" / "octavo" / "kernels" / "triton").glob("*.py")
    launched = {name for path in sources for name in re.findall(r"^ +(_\w+)\[", path.read_text("utf-8"), re.MULTILINE)}
    assert {"_attend", "_merge_partitions", "_rope_and_write_kv"} <= launched
    bounds = read_bounds(table)
    assert {(kernel, target) for _, kernel, target in bounds} >= {(name, t) for name in launched for t in TARGETS}
    assert {case for case, _, _ in bounds} == set(CASES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "fp8", "int8"])
def test_products_of_one_row_use_instructions_of_many_rows(table, target, kind):
    """A row's bits depend on the instruction that multiplies it."""
    bounds = read_bounds(table)
    many, few, one = (
        bounds[f"linear {kind} {rows}", kernel, target]
        for rows, kernel in (
            ("256 rows", "_matmul"),
            ("256 rows" if kind in {"fp8", "float32"} else "64 rows", "_matmul"),
            ("1 row", "_multiply_partition"),
        )
    )
    assert many.products == few.products == one.products
    assert few.num_warps == one.num_warps
    assert many.num_warps == (8 if many is not few and target != "sm_100" else few.num_warps)
    assert len(many.products.split(" + ")) == 1
    assert many.products or kind == "float32"  # multiplied by lanes


@pytest.mark.parametrize(
    ("field", "more", "is_allowed"),
    [("registers", 8, True), ("registers", 9, False), ("spilled_bytes", 4, False), ("shared_bytes", 1, False)],
)
def test_kernel_resources_above_bound_are_reported(field, more, is_allowed):
    bound = Taken("case", "kernel", "sm_90", 64, 0, 1024, 4, 3, "wgmma m64n128k16")
    taken = replace(bound, **{field: getattr(bound, field) + more})
    assert (exceeded(taken, {bound.key: bound}) == []) == is_allowed


@pytest.mark.parametrize(("field", "other"), [("products", "wgmma m64n64k16"), ("num_warps", 8)])
def test_other_instructions_for_products_are_reported(field, other):
    bound = Taken("case", "kernel", "sm_90", 64, 0, 1024, 4, 3, "wgmma m64n128k16")
    (problem,) = exceeded(replace(bound, **{field: other}), {bound.key: bound})
    assert "multiplies by" in problem


@pytest.mark.parametrize("wide_offsets", [2, 4])
def test_other_number_of_wide_offsets_is_reported(wide_offsets):
    bound = Taken("case", "kernel", "sm_90", 64, 0, 1024, 4, 3, "wgmma m64n128k16")
    (problem,) = exceeded(replace(bound, wide_offsets=wide_offsets), {bound.key: bound})
    assert "offsets of 64 bits" in problem


def test_hardware_limit_and_missing_bound_are_reported():
    taken = Taken("case", "kernel", "gfx942", 64, 0, 65537, 4, 3, "")
    (problem,) = exceeded(taken, {taken.key: taken})
    assert "65537 shared bytes, at most 65536" in problem
    (problem,) = exceeded(taken, {})
    assert "has no bound" in problem
