"""Each tensor-core product that reads copies follows a fence between the proxies."""

import pytest

pytest.importorskip("triton")

from octavo.kernels.triton.proxy_fences import FENCE, add_fences, install, is_fenced

WGMMA = "\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1;"
TCGEN05 = "\t@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;"
WAIT, BARRIER = "\tcp.async.wait_group \t2;", "\tbar.sync \t0;"


def text(*lines):
    return "\n".join(lines)


@pytest.mark.parametrize("product", [WGMMA, TCGEN05])
@pytest.mark.parametrize("wait", [WAIT, "\tcp.async.wait_all;"])
def test_fence_is_added_before_barrier(product, wait):
    assert not is_fenced(text(wait, BARRIER, product))
    assert add_fences(text(wait, BARRIER, product)) == text(wait, f"\t{FENCE}", BARRIER, product)


def test_each_wait_gets_fence():
    """A loop's first product follows the wait before the loop, too."""
    fenced = add_fences(text(WAIT, BARRIER, "$L__BB0_1:", WGMMA, WAIT, BARRIER, "@%p1 bra $L__BB0_1;"))
    assert fenced.count(FENCE) == 2
    assert is_fenced(fenced)


def test_fenced_code_and_code_without_products_stay_unchanged():
    for code in (text(WAIT, BARRIER, f"\t{FENCE}", WGMMA), text(WAIT, BARRIER, "\tld.shared.b32 %r1, [%r2];"), WGMMA):
        assert is_fenced(code)
        assert add_fences(code) == code


def test_compiler_is_changed_once():
    from triton.backends import backends

    compiler = backends["nvidia"].compiler
    make_ptx = compiler.make_ptx
    install()
    assert compiler.adds_fences
    assert compiler.make_ptx is make_ptx
