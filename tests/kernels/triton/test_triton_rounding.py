"""Rounding in kernels is that of torch, in the interpreter, too."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from octavo.kernels.triton.rounding import dot, round_to, round_to_whole  # noqa: E402  once there is Triton


@triton.jit
def _round(x_ptr, out_ptr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, round_to(tl.load(x_ptr + index), out_ptr.dtype.element_ty))


@triton.jit
def _round_to_whole(x_ptr, out_ptr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, round_to_whole(tl.load(x_ptr + index)))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    acc = tl.zeros([16, 16], tl.float32)
    product = dot(tl.load(a_ptr + row * 16 + column), tl.load(b_ptr + row * 16 + column), acc)
    tl.store(out_ptr + row * 16 + column, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_to_nearest_even(generator, dtype):
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.randn(1016, generator=generator), ties])
    out = torch.empty(1024, dtype=dtype)
    _round[(1,)](x, out, COUNT=1024)
    expected = x.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_to_whole_numbers(generator):
    x = torch.cat([torch.rand(1019, generator=generator) * 254 - 127, torch.tensor([0.5, 1.5, -2.5, 126.5, -0.3])])
    out = torch.empty(1024)
    _round_to_whole[(1,)](x, out, COUNT=1024)
    assert torch.equal(out, x.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(generator, dtype):
    a, b = (torch.randint(-8, 9, (16, 16), generator=generator).to(dtype) / 8 for _ in range(2))
    out = torch.empty(16, 16)
    _dot[(1,)](a, b, out)
    assert torch.equal(out, a.float() @ b.float())
