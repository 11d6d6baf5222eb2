"""copy_rows and sigmoid_gate."""

import pytest
import torch

from octavo.kernels.operations.copy_rows import copy_rows
from octavo.kernels.operations.sigmoid_gate import sigmoid_gate

DTYPES = [torch.float32, torch.bfloat16]


def strided(shape, dtype, generator):
    """Return heads of tokens that are a part of wider rows."""
    tokens, heads, size = shape
    wide = torch.randn(tokens, heads + 3, size, generator=generator).to(dtype)
    return wide[:, 1 : heads + 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 17), (70, 4, 40), (5, 16, 256)])
def test_gate_multiplies_by_sigmoid_and_rounds_once(kernels, generator, shape, dtype):
    x, gate = (strided(shape, dtype, generator) for _ in range(2))
    gate[0, 0, 0] = -200.0
    exact = x.double() * gate.double().sigmoid()
    sigmoid_gate(kernels, x, gate)
    torch.testing.assert_close(x.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_of_gate_does_not_depend_on_other_rows(kernels, generator, dtype):
    x, gate = (strided((40, 3, 24), dtype, generator) for _ in range(2))
    alone = x[17:18].clone()
    sigmoid_gate(kernels, alone, gate[17:18])
    sigmoid_gate(kernels, x, gate)
    assert torch.equal(x[17:18], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 17), (70, 4, 40)])
def test_copy_changes_only_the_named_heads(kernels, generator, shape, dtype):
    tokens, heads, size = shape
    x, whole = strided(shape, dtype, generator), torch.zeros(tokens, heads + 2, size, dtype=dtype)
    copy_rows(kernels, x, whole[:, 1 : heads + 1])
    assert torch.equal(whole[:, 1 : heads + 1], x)
    assert not whole[:, 0].any()
    assert not whole[:, -1].any()


def test_shapes_that_differ_are_refused():
    from octavo.kernels.cpu import CpuKernels

    kernels = CpuKernels("portable", num_threads=1)
    with pytest.raises(ValueError, match="different shapes"):
        sigmoid_gate(kernels, torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="not \\[tokens, heads, head_dim\\]"):
        copy_rows(kernels, torch.zeros(2, 3, 4).transpose(1, 2), torch.zeros(2, 4, 3))
