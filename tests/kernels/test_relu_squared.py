"""relu_squared."""

import pytest
import torch

from octavo.kernels.operations.relu_squared import relu_squared

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (70, 160), (5, 1023)])
def test_negative_values_become_zero_and_others_are_squared(kernels, generator, shape, dtype):
    x = torch.randn(*shape, generator=generator).to(dtype)
    exact = x.double().clamp(min=0).square()
    relu_squared(kernels, x)
    torch.testing.assert_close(x.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2**-23, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_rounded_once_like_torch(kernels, generator, dtype):
    x = torch.randn(40, 33, generator=generator).to(dtype)
    expected = x.float().relu().square().to(dtype)
    relu_squared(kernels, x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(kernels, dtype):
    x = torch.tensor([[1.0, torch.nan, -2.0]], dtype=dtype)
    relu_squared(kernels, x)
    assert x.isnan().tolist() == [[False, True, False]]


def test_other_layouts_are_refused():
    from octavo.kernels.cpu import CpuKernels

    kernels = CpuKernels("portable", num_threads=1)
    with pytest.raises(ValueError, match="x"):
        relu_squared(kernels, torch.zeros(4, 6)[:, :3])
    with pytest.raises(ValueError, match="not \\[rows, size\\]"):
        relu_squared(kernels, torch.zeros(4, 6, 2))
