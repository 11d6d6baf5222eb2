"""Why there are kernels of our own: operations of plain torch whose rows depend on their neighbours.

Each is expected to fail, strictly: the day one stops failing, this list says so. bfloat16 products are left out, since
whether they fail depends on the processor.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.reference import ReferenceKernels


def assert_rows_are_independent(operation, x):
    alone = torch.cat([operation(x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(operation(x), alone)


@pytest.mark.xfail(strict=True, reason="one row takes another path (a matrix-vector product) than many")
def test_float32_linear(generator):
    kernels = ReferenceKernels()
    packed = kernels.pack_linear(torch.randn(160, 896, generator=generator))
    assert_rows_are_independent(lambda x: kernels.linear(x, packed), torch.randn(130, 896, generator=generator))


@pytest.mark.xfail(strict=True, reason="elements in the last incomplete vector of the tensor are computed another way")
def test_float32_silu(generator):
    assert_rows_are_independent(F.silu, torch.randn(130, 123, generator=generator) * 5)
