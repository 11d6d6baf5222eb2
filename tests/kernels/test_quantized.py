"""int8 weights times int8 activations: one expression of exact integer sums, so every backend gives the same bits."""

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels

from octavo.kernels.quantization import Int8Weight, quantize_int8, quantize_rows
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.rotation import rotate, rotation_block

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 1, 1),
    (5, 123, 123),
    (3, 64, 33),
    (9, 257, 40),
    (33, 300, 70),
    (130, 520, 65),
    (700, 1030, 96),
    (1, 128, 1024),
    (16, 896, 1024),
    (7, 576, 96),
    (20, 1536, 33),
]


def random(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_same_bits(result, expected):
    """Compare bits, including the sign of zero; any two NaN are equal."""
    assert torch.equal(result.isnan(), expected.isnan())
    bits = torch.int32 if result.dtype == torch.float32 else torch.int16
    result, expected = (each.nan_to_num(nan=1.0).view(bits) for each in (result, expected))
    assert torch.equal(result, expected)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_int8_product_has_bits_of_reference_on_every_isa(compiled, generator, x_dtype, shape):
    rows, depth, width = shape
    x = random(generator, rows, depth, dtype=x_dtype) * 10
    weight, bias = quantize_int8(random(generator, width, depth)), random(generator, width)
    for biases in (bias, None):
        packed, plain = compiled.pack_linear(weight, biases), ReferenceKernels().pack_linear(weight, biases)
        for float32_out in (True, False):
            result = compiled.linear(x, packed, float32_out=float32_out)
            assert_same_bits(result, ReferenceKernels().linear(x, plain, float32_out=float32_out))


@pytest.mark.parametrize("depth", [1024, 4864, 65536])
def test_largest_int8_sums_do_not_overflow(compiled, depth):
    x = torch.full((3, depth), 5.0)
    x[1] = -5.0
    x[2, ::2] = -5.0
    values = torch.full((40, depth), 127, dtype=torch.int8)
    values[1::3] = -127
    values[2::3] = -128  # checkpoints of other programs may have it
    weight = Int8Weight(values, torch.ones(40))
    expected = ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weight))
    assert torch.equal(compiled.linear(x, compiled.pack_linear(weight)), expected)
    assert expected[0, 0] == torch.tensor(127.0 * 127 * depth).float() * (torch.tensor(5.0) / 127)


def test_int8_product_handles_zero_tiny_and_non_finite_rows(kernels, generator):
    x = random(generator, 8, 70)
    x[1] = 0
    x[2] *= 1e-35
    x[3, 5] = torch.nan
    x[4, 69] = torch.inf
    x[5, 0] = -torch.inf
    x[6] *= 1e30
    x[7] = -0.3
    x[7, 0] = 127.0
    weight = quantize_int8(random(generator, 33, 70))
    result = kernels.linear(x, kernels.pack_linear(weight))
    assert_same_bits(result, ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weight)))
    assert torch.equal(result.isnan().all(dim=1), torch.tensor([False, False, False, True, True, True, False, False]))
    assert torch.equal(result.isnan().any(dim=1), result.isnan().all(dim=1))
    assert not result[1:3].any()
    assert result[6].isfinite().all()
    assert result[6].abs().max() > 1e28


@pytest.mark.parametrize(("depth", "width"), [(896, 160), (4864, 96), (123, 33)])
def test_int8_row_is_independent_of_batch_rows(compiled, generator, depth, width):
    packed = compiled.pack_linear(quantize_int8(random(generator, width, depth)), random(generator, width))
    x = random(generator, 130, depth, dtype=torch.bfloat16)
    x[0] *= 3
    alone = torch.cat([compiled.linear(x[i : i + 1], packed, float32_out=True) for i in range(130)])
    for rows in (2, 3, 7, 8, 9, 13, 14, 15, 28, 29, 33, 130):
        assert torch.equal(compiled.linear(x[:rows], packed, float32_out=True), alone[:rows]), rows
    assert torch.equal(compiled.linear(x[97:], packed, float32_out=True), alone[97:])


@pytest.mark.parametrize("isa", ISAS)
def test_int8_product_bits_are_independent_of_threads(isa, generator):
    weight, x = quantize_int8(random(generator, 300, 200)), random(generator, 40, 200)
    results = [k.linear(x, k.pack_linear(weight)) for k in (compiled_kernels(isa), compiled_kernels(isa, 1))]
    assert torch.equal(*results)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_int8_embedding_returns_dequantized_rows(kernels, generator, out_dtype):
    weight = quantize_int8(random(generator, 100, 45))
    ids = torch.tensor([99, 0, 31, 32, 99, 64])
    expected = weight.dequantize()[ids].to(out_dtype)
    assert torch.equal(kernels.embedding(ids, kernels.pack_linear(weight), out_dtype), expected)


def test_int8_product_accepts_strided_and_zero_rows(kernels, generator):
    x = random(generator, 6, 200)[:, 50:150]
    weight = quantize_int8(random(generator, 40, 300)[:, 20:120])
    assert torch.equal(
        kernels.linear(x, kernels.pack_linear(weight)), kernels.linear(x.contiguous(), kernels.pack_linear(weight))
    )
    assert kernels.linear(x[:0], kernels.pack_linear(weight)).shape == (0, 40)


def test_int8_rounding_is_symmetric_to_nearest_even_with_maximum_127(generator):
    values, scales = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, -127.0], [0, 0, 0, 0, 0, 0]]))
    assert values.tolist() == [[127, 0, 2, 0, -2, -127], [0] * 6]
    assert scales.tolist() == [1.0, 0.0]
    weight = random(generator, 50, 80, dtype=torch.bfloat16)
    rounded = quantize_int8(weight)
    assert (rounded.values.abs().amax(dim=1) == 127).all()
    error = (rounded.values * rounded.scales.unsqueeze(1) - rotate(weight) / rotation_block(80)).abs()
    assert (error <= rounded.scales.unsqueeze(1) * 0.5001).all()


def test_int8_product_error_is_rounding_error_alone(fastest, generator):
    x, weight = random(generator, 64, 512), random(generator, 256, 512)
    exact = x.double() @ weight.double().T
    result = fastest.linear(x, fastest.pack_linear(quantize_int8(weight))).double()
    relative = (result - exact).norm() / exact.norm()
    # Uniform rounding to steps of amax / 127 in both factors: two independent errors of step / sqrt(12).
    turned = [rotate(each).double() / rotation_block(512) ** 0.5 for each in (x, weight)]
    steps = torch.tensor([(each.abs().amax(dim=1) / 127).square().mean().sqrt() for each in turned])
    expected = (steps.square() / 12).sum().sqrt()
    assert 0.8 * expected < relative < 1.2 * expected


def test_int8_num_bytes_counts_padded_panels(fastest):
    packed = fastest.pack_linear(quantize_int8(torch.ones(33, 5)))
    assert packed.num_bytes == 64 * (8 + 4 + 4)
