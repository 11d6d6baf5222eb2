"""Rows are rotated before they are rounded: the transform, its order of additions, and its purpose."""

import pytest
import torch
from kernel_backends import compiled_kernels
from test_quantized import assert_same_bits, random

from octavo.kernels.quantization import Int8Weight, quantize_int8, quantize_rows
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.rotation import rotate, rotation_block

BLOCKS = {1: 1, 33: 1, 70: 2, 36: 4, 40: 8, 48: 16, 96: 32, 576: 64, 896: 128, 1536: 256, 4864: 256, 65536: 256}


def hadamard(size):
    """Return the Hadamard matrix by Sylvester's rule, as float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize(("in_features", "block"), BLOCKS.items())
def test_rotation_multiplies_blocks_by_hadamard_matrix(in_features, block, generator):
    assert rotation_block(in_features) == block
    x = torch.randint(-99, 100, (3, in_features), generator=generator)
    expected = (x.double().view(3, -1, block) @ hadamard(block)).view(3, -1)
    assert torch.equal(rotate(x).double(), expected)
    assert torch.equal(rotate(rotate(x)), x.float() * block)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("in_features", list(BLOCKS)[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_rotation_has_bits_of_reference(compiled, generator, dtype, in_features):
    """The scales of rows and weights depend on the last bits of their largest sums."""
    magnitudes = torch.logspace(-3, 3, 40).unsqueeze(1)
    weight, x = (random(generator, 40, in_features).mul(magnitudes).to(dtype) for _ in range(2))
    rounded = compiled.round_weight(weight, 8)
    assert torch.equal(rounded.values, quantize_int8(weight).values)
    assert_same_bits(rounded.scales, quantize_int8(weight).scales)
    packed, plain = compiled.pack_linear(rounded), ReferenceKernels().pack_linear(rounded)
    for rows in (1, 3, 17, 40):
        result = compiled.linear(x[-rows:], packed, float32_out=True)
        assert_same_bits(result, ReferenceKernels().linear(x[-rows:], plain, float32_out=True))


def test_other_addition_order_changes_rotation_bits(generator):
    """So the test above can fail."""
    x = random(generator, 40, 1536)
    otherwise, apart = x.clone(), 128
    while apart >= 1:
        first, second = otherwise.unflatten(-1, (-1, 2, apart)).unbind(-2)
        otherwise = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        apart //= 2
    torch.testing.assert_close(otherwise, rotate(x), rtol=1e-4, atol=1e-4)
    assert (quantize_rows(otherwise)[1] != quantize_rows(rotate(x))[1]).sum() > 5


@pytest.mark.parametrize("in_features", [576, 896, 1536])
def test_rotation_reduces_int8_error_from_outlier_features(fastest, generator, in_features):
    x, weight = random(generator, 64, in_features), random(generator, 96, in_features)
    x[:, [5, 300]] *= 60
    exact = x.double() @ weight.double().T
    result = fastest.linear(x, fastest.pack_linear(quantize_int8(weight)))
    (values, scales), (columns, column_scales) = quantize_rows(x), quantize_rows(weight)
    as_they_stand = (values @ columns.T) * (scales.unsqueeze(1) * column_scales)
    error, unrotated = ((each.double() - exact).norm() for each in (result, as_they_stand))
    assert error < 0.35 * unrotated


def test_overflowing_rotation_makes_row_nan(kernels):
    """float32 ends at 3.4e38: the sum of 32 values of 2e37 overflows."""
    x = torch.full((2, 96), 2e37)
    x[1] *= 0.1
    result = kernels.linear(x, kernels.pack_linear(Int8Weight(torch.ones(33, 96, dtype=torch.int8), torch.ones(33))))
    assert result.isnan().all(dim=1).tolist() == [True, False]


def test_int8_embedding_reverses_rotation(kernels, generator):
    weight = random(generator, 70, 576)
    packed = kernels.pack_linear(quantize_int8(weight))
    rows = kernels.embedding(torch.arange(70), packed, torch.float32)
    assert (rows - weight).norm() / weight.norm() < 0.01


def test_int4_weights_are_not_rotated(generator):
    """int4 weights are not rotated: a checkpoint's integers stay unchanged."""
    kernels, x = compiled_kernels("portable"), torch.zeros(1, 96)
    x[0, 3] = 1.0
    weight = random(generator, 40, 96)
    rounded = kernels.round_weight(weight, 4)
    result = kernels.linear(x, kernels.pack_linear(rounded))
    torch.testing.assert_close(result[0], rounded.dequantize()[:, 3], rtol=2e-3, atol=2e-3)
