"""The text of a compiled kernel is searched for dependence on timing and fusion."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from compiled_code import are_groups_synchronized, faults, has_barrier_between_loops, products, wide_offsets

WGMMA = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1;"
FENCE = "fence.proxy.async.shared::cta;"
COPIES = ("cp.async.wait_group 0;", "bar.sync 0;")


def ptx(*lines, threads=256):
    return "\n".join([f".reqntid {threads}", *lines])


def kernel(text, *, fusion=False, ttir=""):
    return SimpleNamespace(metadata=SimpleNamespace(enable_fp_fusion=fusion), asm={"ptx": text, "ttir": ttir})


def test_products_are_named_with_their_shapes():
    assert products(f"{WGMMA}\n{WGMMA}") == "wgmma m64n128k16"
    assert products("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {}") == "mma m16n8k16"
    assert products("@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1]") == "tcgen05 f16"
    assert products("v_mfma_f32_32x32x8_bf16_1k a[0:15]") == "mfma 32x32x8"
    assert products("add.f32") == ""


@pytest.mark.parametrize(
    ("wrong", "right", "fault"),
    [
        (kernel(ptx(*COPIES, WGMMA)), kernel(ptx(*COPIES, FENCE, WGMMA)), "without a fence"),
        (kernel(ptx(), fusion=True), kernel(ptx()), "enable_fp_fusion"),
        (kernel(ptx("fma.rn.f32 %f1;")), kernel(ptx("fma.rn.f32 %f1;"), ttir="math.fma"), "are fused"),
        (
            kernel(ptx("wgmma.wait_group.sync.aligned 0;", "cp.async.cg.shared.global [%r1]")),
            kernel(ptx("wgmma.wait_group.sync.aligned 0;", "bar.sync 0;", "cp.async.cg.shared.global [%r1]")),
            "warp group",
        ),
    ],
)
def test_fault_is_reported(wrong, right, fault):
    (found,) = faults(wrong)
    assert fault in found
    assert faults(right) == []


def test_product_of_float32_may_fuse():
    dot = "%1 = tt.dot %2, %3, %4, inputPrecision = ieee : tensor<64x32xf32> * tensor<32x128xf32> -> tensor<64x128xf32>"
    assert faults(kernel(ptx("fma.rn.f32 %f1;"), ttir=dot)) == []


def test_groups_are_not_synchronized_if_next_round_of_loop_writes():
    loop = ["$L__BB0_1:", "cp.async.cg.shared.global [%r1]", WGMMA, "wgmma.wait_group.sync.aligned 0;"]
    assert not are_groups_synchronized(ptx(*loop, "@%p1 bra $L__BB0_1;"))
    assert are_groups_synchronized(ptx(*loop, "bar.sync 0;", "@%p1 bra $L__BB0_1;"))
    assert are_groups_synchronized(ptx(*loop, "@%p1 bra $L__BB0_1;", threads=128))  # only one group


def test_missing_barrier_before_rereading_is_reported():
    (found,) = faults(kernel(ptx(), ttir="scf.for scf.for"), rereads=True)
    assert "without a barrier" in found
    assert faults(kernel(ptx(), ttir="scf.for gpu.barrier scf.for"), rereads=True) == []


def test_offsets_of_64_bits_are_counted():
    of_tile = "%2 = tt.addptr %1, %0 : tensor<64x128x!tt.ptr<bf16>, #blocked>, tensor<64x128x{0}, #blocked> loc(#loc1)"
    of_program = "%2 = tt.addptr %1, %0 : !tt.ptr<bf16>, {0} loc(#loc1)"
    for line in (of_tile, of_program, of_tile.replace(", #blocked", ""), of_program.removesuffix(" loc(#loc1)")):
        assert wide_offsets(f"{line.format('i64')}\n{line.format('i32')}\n{line.format('i64')}") == 2


def test_products_of_tf32_are_reported():
    dot = "%1 = tt.dot %2, %3, %4, inputPrecision = {} : tensor<64x32xf32> * tensor<32x128xf32> -> tensor<64x128xf32>"
    (found,) = faults(kernel(ptx(), ttir=dot.format("tf32")))
    assert "tf32" in found
    assert faults(kernel(ptx(), ttir=dot.format("tf32x3"))) == []


def test_barrier_counts_only_between_loops():
    assert has_barrier_between_loops("scf.for\ngpu.barrier\nscf.for")
    assert not has_barrier_between_loops("gpu.barrier\nscf.for\nscf.for")
    assert not has_barrier_between_loops("scf.for\nscf.for\ngpu.barrier")
    assert not has_barrier_between_loops("scf.for\nscf.for")
