"""Weights rounded to integers: every instruction set gives the bits of torch, and changes need a new version number."""

import hashlib

import pytest
import torch

from octavo.kernels.quantization import ROUNDING_VERSION, quantize_int4, quantize_int8
from octavo.kernels.reference import ReferenceKernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 31), (3, 64), (70, 33), (33, 4864), (400, 896)]


def weights(generator, shape, dtype):
    """Return rows of usual sizes, zeros, tiny and huge values, ties, NaN and infinity."""
    weight = torch.randn(*shape, generator=generator) * 0.02
    weight[::5] *= 1e3
    weight[1::7] = 0
    weight[2::7] *= 1e-36
    weight[3::7] = torch.where(weight[3::7] > 0, 0.25, -0.25)
    weight[4::11, -1] = torch.nan
    weight[6::11, 0] = torch.inf
    weight[8::11, -1] = -torch.inf
    return weight.to(dtype)


def assert_equal(result, expected):
    assert torch.equal(result.values, expected.values)
    assert torch.equal(result.scales.nan_to_num(nan=-1.0), expected.scales.nan_to_num(nan=-1.0))
    assert torch.equal(result.scales.isnan(), expected.scales.isnan())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_rounding_has_bits_of_reference(compiled, generator, dtype, shape):
    weight = weights(generator, shape, dtype)
    assert_equal(compiled.round_weight(weight, 8), quantize_int8(weight))


@pytest.mark.sweep(64)
@pytest.mark.parametrize("group_size", [32, 128, 4864])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_rounding_has_bits_of_reference(compiled, generator, dtype, shape, group_size):
    weight = weights(generator, shape, dtype)
    result, expected = compiled.round_weight(weight, 4, group_size), quantize_int4(weight, group_size)
    assert_equal(result, expected)
    assert result.group_size == expected.group_size
    assert result.zeros is expected.zeros is None


def on_a_grid(generator, out_features, in_features, dtype=torch.float32):
    """Return values of sixteen steps above a minimum, in groups of 32, as some programs store them."""
    groups = -(-in_features // 32)
    steps = torch.rand(out_features, groups, 1, generator=generator) * 0.1 + 0.02
    zeros = torch.rand(out_features, groups, 1, generator=generator) * 8 + 3.5
    values = torch.randint(0, 16, (out_features, groups, 32), generator=generator)
    values[:, :, 3], values[:, :, 8] = 0, 15  # each group uses its full range
    return ((values - zeros) * steps).flatten(1)[:, :in_features].to(dtype)


@pytest.mark.sweep(32)
@pytest.mark.parametrize("in_features", [31, 64, 100, 4864])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_rounding_with_minima_has_bits_of_reference(kernels, generator, dtype, in_features):
    weight = on_a_grid(generator, 70, in_features, dtype)
    result, expected = kernels.round_weight(weight, 4), quantize_int4(weight)
    assert_equal(result, expected)
    assert result.zeros.dtype == torch.float16
    assert torch.equal(result.zeros, expected.zeros)


def test_int4_minima_are_used_only_if_they_reduce_error_enough(generator):
    weight = on_a_grid(generator, 300, 256)
    rounded, without = quantize_int4(weight), quantize_int4(weight, minima=False)
    errors = [(each.dequantize() - weight).norm() / weight.norm() for each in (rounded, without)]
    assert errors[0] < 0.02
    assert errors[1] > 0.05
    plain = torch.randn(300, 256, generator=generator)
    assert quantize_int4(plain).zeros is None
    errors = [(quantize_int4(plain, minima=each).dequantize() - plain).norm() for each in (True, False)]
    assert 0.85 * errors[1] < errors[0] < errors[1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_minima_of_extreme_rows_have_bits_of_reference(compiled, generator, dtype):
    """Rows of zeros, tiny, huge, tied and broken numbers have the bits of the reference, with minima as without."""
    weight = weights(generator, (70, 100), dtype)
    expected = quantize_int4(weight, minima=True)
    assert_equal(compiled.round_to_int4(weight, 32, minima=True), expected)
    assert torch.equal(compiled.round_to_int4(weight, 32, minima=True).zeros, expected.zeros)


def test_strided_weights_are_rounded_as_contiguous_ones(kernels, generator):
    whole = torch.randn(40, 200, generator=generator)
    assert_equal(kernels.round_weight(whole[:, 7:107], 8), quantize_int8(whole[:, 7:107].contiguous()))
    assert_equal(kernels.round_weight(whole.T, 4), quantize_int4(whole.T.contiguous()))


def test_reference_round_weight_equals_quantize_functions(generator):
    weight = weights(generator, (40, 64), torch.bfloat16)
    assert_equal(ReferenceKernels().round_weight(weight, 8), quantize_int8(weight))
    assert_equal(ReferenceKernels().round_weight(weight, 4, 64), quantize_int4(weight, 64))


@pytest.mark.parametrize(("bits", "digest"), [(8, "178d843c3c8afae3"), (4, "240049daaa033d85")])
def test_rounded_bytes_change_only_with_rounding_version(kernels, bits, digest):
    """Only the version distinguishes kept weights on disk from older ones."""
    weight = ((torch.arange(96 * 70, dtype=torch.int64) * 7919 % 2003 - 1001).float() / 512).view(96, 70).bfloat16()
    rounded = kernels.round_weight(weight, bits)
    found = hashlib.blake2b(rounded.values.numpy().tobytes(), digest_size=8)
    found.update(rounded.scales.float().numpy().tobytes())
    assert (ROUNDING_VERSION, found.hexdigest()) == (3, digest), (
        "count ROUNDING_VERSION up, then put the new digest here"
    )


def test_round_weight_accepts_float64_and_refuses_integers(kernels, generator):
    weight = torch.randn(40, 70, generator=generator, dtype=torch.float64)
    assert_equal(kernels.round_weight(weight, 8), quantize_int8(weight))
    with pytest.raises(ValueError, match="int8"):
        kernels.round_weight(torch.ones(40, 64, dtype=torch.int8), 8)
