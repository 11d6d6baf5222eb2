"""E4M3 by integer arithmetic: the bytes of torch, and those of its definition, bit for bit."""

import pytest
import torch
from broken_kernels import broken

from octavo.kernels.quantization import round_to_e4m3

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from octavo.kernels.triton.e4m3 import as_bytes, to_e4m3, to_float32  # noqa: E402  once there is Triton

_BLOCK = 4096


@triton.jit
def _convert(x_ptr, out_ptr, count, convert: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, convert(tl.load(x_ptr + index, mask=index < count)), mask=index < count)


def converted(convert, x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    _convert[(triton.cdiv(len(x), _BLOCK),)](x, out, len(x), convert, BLOCK=_BLOCK)
    return out


def all_bytes():
    return torch.arange(256).to(torch.uint8)


def numbers():
    """Return all of bfloat16, and the midpoints of neighbours in E4M3, with a bit less and a bit more than each."""
    of_bfloat16 = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32)
    values = as_defined(all_bytes()[:127])
    halfway = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([464.0])])
    around = [halfway, halfway.nextafter(torch.tensor(torch.inf)), halfway.nextafter(torch.tensor(0.0))]
    return torch.cat([of_bfloat16, *around, *(-each for each in around)])


def as_defined(code):
    """Return the values by OCP 8-bit floating point (OFP8) 1.0, table 1: E4M3."""
    exponent, mantissa = (code >> 3 & 15).double(), (code & 7).double()
    value = torch.where(exponent > 0, (1 + mantissa / 8) * 2 ** (exponent - 7), mantissa / 8 * 2**-6)
    return torch.where(code & 0x7F == 0x7F, torch.nan, torch.where(code >= 128, -value, value)).float()


def nearest(x):
    """Return the byte of the nearest value (of two equally near ones, the even one) by comparing all values."""
    distance = (x.double().abs().clamp(max=448)[:, None] - as_defined(all_bytes()[:127]).double()).abs()
    even_first = torch.cat([torch.arange(0, 127, 2), torch.arange(1, 127, 2)])
    code = even_first[distance[:, even_first].argmin(dim=1)]
    return (torch.where(x.isnan(), 0x7F, code) + 128 * x.signbit()).to(torch.uint8)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy warns of signalling NaN
def test_e4m3_rounding_is_to_nearest_even(kernels):
    x = numbers()
    expected = nearest(x)
    assert torch.equal(as_bytes(round_to_e4m3(x)), expected)
    assert torch.equal(converted(to_e4m3, x, torch.uint8), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_e4m3_byte_decodes_as_specified(kernels, dtype):
    expected = as_defined(all_bytes())
    read = converted(to_float32, all_bytes(), torch.float32)
    for each in (read, read.to(dtype).float(), all_bytes().view(torch.float8_e4m3fn).float()):
        assert torch.equal(each.nan_to_num(nan=1000.0), expected.nan_to_num(nan=1000.0))
        assert torch.equal(each.signbit() | each.isnan(), (all_bytes() >= 128) | expected.isnan())


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x7FFFF + ((magnitude >> 20) & 1)", "0x80000"),
        ("normal = tl.minimum(nearest - (_BIAS << 3), 0x7E)", "normal = nearest - (_BIAS << 3)"),
        ("0x7F800000, 0x7F, code)", "0x7F800000, 0x7E, code)"),
        ("_MAGIC = tl.constexpr(16384.0)", "_MAGIC = tl.constexpr(16383.0)"),
    ],
    ids=["ties", "saturation", "NaN", "small ones"],
)
def test_broken_e4m3_rounding_is_detected(kernels, tmp_path, old, new):
    wrong = broken(tmp_path, "e4m3", old, new)
    x = numbers()
    assert not torch.equal(converted(wrong.to_e4m3, x, torch.uint8), as_bytes(round_to_e4m3(x)))
