"""Kernels round as torch does, in the interpreter too."""

import pytest
import torch
from broken_kernels import broken

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from octavo.kernels.triton import rounding  # noqa: E402  once there is Triton


@triton.jit
def _round(x_ptr, out_ptr, function: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, function(tl.load(x_ptr + index), out_ptr.dtype.element_ty))


@triton.jit
def _round_to_whole(x_ptr, out_ptr, function: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, function(tl.load(x_ptr + index)))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    acc = tl.zeros([16, 16], tl.float32)
    product = rounding.dot(tl.load(a_ptr + row * 16 + column), tl.load(b_ptr + row * 16 + column), acc)
    tl.store(out_ptr + row * 16 + column, product)


def assert_rounds(module, generator, dtype):
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # a NaN that would carry into the sign
    x = torch.cat([torch.randn(1015, generator=generator), ties, all_ones])
    out = torch.empty(1024, dtype=dtype)
    _round[(1,)](x, out, module.round_to, COUNT=1024)
    expected = x.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_to_dtype_is_to_nearest_even(kernels, generator, dtype):
    assert_rounds(rounding, generator, dtype)


def assert_rounds_to_whole(module, generator):
    x = torch.cat([torch.rand(1019, generator=generator) * 254 - 127, torch.tensor([0.5, 1.5, -2.5, 126.5, -0.3])])
    out = torch.empty(1024)
    _round_to_whole[(1,)](x, out, module.round_to_whole, COUNT=1024)
    assert torch.equal(out, x.round())


def test_round_to_whole_equals_torch_round(generator):
    assert_rounds_to_whole(rounding, generator)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(bits + 0x7FFF + ((bits >> 16) & 1))", "(bits + 0x8000)"),
        ("tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)", "nearest.to(tl.float32, bitcast=True)"),
        ("12582912.0", "8388608.0"),
    ],
    ids=["ties", "NaN", "negative numbers"],
)
def test_broken_rounding_is_detected(kernels, generator, device, tmp_path, old, new):
    if device.type != "cpu":
        pytest.skip("a GPU rounds to bfloat16 by itself")
    wrong = broken(tmp_path, "rounding", old, new)
    with pytest.raises(AssertionError):  # noqa: PT012
        assert_rounds(wrong, generator, torch.bfloat16)
        assert_rounds_to_whole(wrong, generator)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy warns of infinity times zero
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dot_equals_torch_product(kernels, generator, dtype):
    a, b = (torch.randint(-8, 9, (16, 16), generator=generator).to(dtype) / 8 for _ in range(2))
    a[:4], a[:, 9:] = 0, 0  # padding, which adds nothing
    for value in (1.0, torch.inf):  # except to NaN
        b[3, 4] = value
        out, expected = torch.empty(16, 16), a.float() @ b.float()
        _dot[(1,)](a, b, out)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
