"""multiply."""

import pytest
import torch

from octavo.kernels.operations.multiply import multiply

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def apart(shape, dtype, generator):
    """Return tokens that are a part of wider rows, and these rows."""
    tokens, size = shape
    wide = torch.randn(tokens, size + 5, generator=generator).to(dtype)
    return wide[:, 3 : size + 3], wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (70, 40), (5, 2048)])
def test_product_is_rounded_once_and_changes_only_x(kernels, generator, shape, dtype):
    (x, wide), (factor, wide_factor) = (apart(shape, dtype, generator) for _ in range(2))
    expected, before = (x.double() * factor.double()).to(dtype), wide_factor.clone()
    around = wide[:, :3].clone(), wide[:, shape[1] + 3 :].clone()
    multiply(kernels, x, factor)
    assert torch.equal(x, expected)
    assert torch.equal(wide_factor, before)
    assert torch.equal(wide[:, :3], around[0])
    assert torch.equal(wide[:, shape[1] + 3 :], around[1])


def test_tensors_that_do_not_fit_are_refused():
    from octavo.kernels.cpu import CpuKernels

    kernels = CpuKernels("portable", num_threads=1)
    with pytest.raises(ValueError, match="factor has another shape"):
        multiply(kernels, torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="different dtypes"):
        multiply(kernels, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="x has another shape"):
        multiply(kernels, torch.zeros(3, 2).t(), torch.zeros(2, 3))
