"""int4 weights in groups times int8 activations: exact sums over all groups, the same bits on every backend."""

import contextlib
import ctypes
import math
import mmap
from dataclasses import replace

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels
from test_quantized import assert_same_bits, random

from octavo.kernels.quantization import Int4Weight, quantize_int4
from octavo.kernels.reference import ReferenceKernels

FLOATS = [torch.float32, torch.bfloat16]
# rows, in_features, out_features, group size; groups that end early, and one group over everything
SHAPES = [
    (1, 1, 1, 32),
    (5, 123, 123, 32),
    (3, 64, 33, 64),
    (9, 257, 40, 128),
    (33, 300, 70, 300),
    (130, 520, 65, 96),
    (300, 520, 65, 96),
    (257, 256, 40, 128),
    (545, 960, 40, 32),  # more rows than meet a panel at a time, more k than a piece of it has
]


def weight_of(generator, out_features, in_features, group_size, scale_dtype=torch.bfloat16, *, zeros=True):
    """Return a weight with random values, scales and zero points."""
    num_groups = -(-in_features // group_size)
    return Int4Weight(
        torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8),
        random(generator, out_features, num_groups, dtype=scale_dtype),
        torch.randint(0, 17, (out_features, num_groups), generator=generator, dtype=torch.uint8) if zeros else None,
        group_size,
    )


def reference(x, weight, bias=None, **options):
    return ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weight, bias), **options)


@pytest.mark.sweep(32)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_int4_product_has_bits_of_reference_on_every_isa(compiled, generator, x_dtype, shape, scale_dtype, zeros):
    rows, depth, width, group_size = shape
    x = random(generator, rows, depth, dtype=x_dtype) * 10
    weight, bias = weight_of(generator, width, depth, group_size, scale_dtype, zeros=zeros), random(generator, width)
    for biases in (bias, None):
        packed = compiled.pack_linear(weight, biases)
        for float32_out in (True, False):
            result = compiled.linear(x, packed, float32_out=float32_out)
            assert_same_bits(result, reference(x, weight, biases, float32_out=float32_out))


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_fractional_zero_points_have_bits_of_reference(compiled, generator, x_dtype, shape):
    rows, depth, width, group_size = shape
    x = random(generator, rows, depth, dtype=x_dtype) * 10
    weight = weight_of(generator, width, depth, group_size)
    weight = replace(weight, zeros=(torch.rand(weight.scales.shape, generator=generator) * 16).half())
    packed, plain = compiled.pack_linear(weight), ReferenceKernels().pack_linear(weight)
    assert_same_bits(compiled.linear(x, packed, float32_out=True), reference(x, weight, float32_out=True))
    rows = ReferenceKernels().embedding(torch.arange(width), plain, torch.float32)
    assert_same_bits(compiled.embedding(torch.arange(width), packed, torch.float32), rows)
    atol = 0.01 * float(weight.scales.abs().max())
    torch.testing.assert_close(rows, weight.dequantize(), rtol=2e-3, atol=atol)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_column_order_gives_bits_of_reordered_inputs(compiled, generator, x_dtype, shape):
    """Integers are summed, so the bits equal those of input features in the weight's order."""
    rows, depth, width, group_size = shape
    x = random(generator, rows, depth, dtype=x_dtype) * 10
    order = torch.randperm(depth, generator=generator)
    weight = weight_of(generator, width, depth, group_size)
    packed = compiled.pack_linear(replace(weight, order=order.int()))
    expected = reference(x[:, order], weight)
    assert_same_bits(compiled.linear(x, packed), expected)
    assert_same_bits(reference(x, replace(weight, order=order.int())), expected)
    (kept,) = compiled.keep_linear(packed)
    assert_same_bits(compiled.linear(x, compiled.restore_linear([kept])), expected)
    for outside in (-1, depth):
        data = kept.data.clone()
        data[-4:].view(torch.int32).fill_(outside)
        with pytest.raises(ValueError, match=f"outside 0 .. {depth - 1}"):
            compiled.restore_linear([replace(kept, data=data)])
    assert packed.num_bytes == compiled.pack_linear(weight).num_bytes + 4 * depth


def test_int4_reference_product_is_close_to_dequantized_product(generator):
    x, weight = random(generator, 20, 256), weight_of(generator, 50, 256, 64)
    exact = x.double() @ weight.dequantize().double().T
    assert (reference(x, weight).double() - exact).norm() / exact.norm() < 0.01  # the rounding of activations


def test_zero_points_above_16_are_refused(kernels, generator):
    weight = weight_of(generator, 8, 64, 32)
    assert weight.zeros is not None
    weight.zeros[3, 1] = 17
    with pytest.raises(ValueError, match="zero points reach 17"):
        kernels.linear(random(generator, 2, 64), kernels.pack_linear(weight))


def test_too_many_input_features_for_int32_sums_are_refused(compiled):
    weight = Int4Weight(torch.zeros(1, 65537, dtype=torch.uint8), torch.ones(1, 1), None, 65537)
    with pytest.raises(ValueError, match="65537 input features"):
        compiled.pack_linear(weight)


def test_column_with_very_different_group_scales_stays_accurate(compiled, generator):
    """The error of a group is at most half a unit of its column, however small the group's values are."""
    weight = weight_of(generator, 40, 256, 32, torch.float32)
    weight.scales.mul_(torch.logspace(0, -5, 8))
    x = random(generator, 20, 256)
    result = compiled.linear(x, compiled.pack_linear(weight))
    assert torch.equal(result, reference(x, weight))
    exact = x.double() @ weight.dequantize().double().T
    assert (result.double() - exact).norm() / exact.norm() < 0.01


def test_int4_scales_are_rounded_to_multiples_of_column_unit(generator):
    for zeros, most in ((False, 4079), (True, 2039)):
        weight = weight_of(generator, 50, 256, 32, zeros=zeros)
        weight.scales[3] = 0
        weight.scales[4] *= 1e-38
        multiples, units = weight.whole_scales()
        assert (multiples.dtype, units.dtype) == (torch.int16, torch.float32)
        assert multiples.abs().amax(dim=1).tolist() == [most] * 3 + [0, 0] + [most] * 45
        whole = multiples.double() * units.double().unsqueeze(1)
        assert ((whole - weight.scales.double()).abs() <= units.double().unsqueeze(1) * 0.501)[5:].all()


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_int4_scale_makes_only_its_column_nan(kernels, generator, broken, rows):
    weight = weight_of(generator, 70, 100, 32)
    weight.scales[35, 2] = broken
    result = kernels.linear(random(generator, rows, 100), kernels.pack_linear(weight))
    assert result.isnan().all(dim=0).nonzero().flatten().tolist() == [35]
    assert result.isnan().any(dim=0).nonzero().flatten().tolist() == [35]


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("value", [0, 15])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_largest_int4_weights_of_either_sign_are_exact(compiled, rows, value, scale):
    depth, width = 1024, 40
    x = torch.full((rows, depth), 5.0)
    x[1] = -5.0
    for zeros in (None, torch.full((width, depth // 32), 16 - value, dtype=torch.uint8)):
        values = torch.full((width, depth), value, dtype=torch.uint8)
        weight = Int4Weight(values, torch.full((width, depth // 32), scale), zeros, 32)
        result = compiled.linear(x, compiled.pack_linear(weight))
        assert torch.equal(result, reference(x, weight))
        expected = 5.0 * depth * scale * (value - (8 if zeros is None else 16 - value))
        assert (result[0] - expected).abs().max() < 1e-5 * abs(expected)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("group_size", [128, 65536])
@pytest.mark.parametrize("rows", [3, 33])  # many rows use another product on some processors
def test_largest_int4_sums_do_not_overflow(compiled, rows, group_size, sign):
    depth = 65536
    x = torch.full((rows, depth), 5.0)
    x[1] = -5.0
    x[2, ::2] = -5.0
    weight = Int4Weight(
        torch.full((40, depth), 15 if sign > 0 else 0, dtype=torch.uint8),
        torch.ones(40, depth // group_size, dtype=torch.float16),
        torch.full((40, depth // group_size), 0 if sign > 0 else 15, dtype=torch.uint8),
        group_size,
    )
    assert torch.equal(compiled.linear(x, compiled.pack_linear(weight)), reference(x, weight))
    assert sign * reference(x, weight)[0, 0] > 4.9e6 * 0.99


@pytest.mark.sweep(16)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("zeros", [False, True])
def test_largest_partial_sums_within_word_do_not_overflow(compiled, rows, zeros):
    """If the first two of four products have a sum of their own, it is largest if the other two have the other sign."""
    depth = 1024
    is_first = (torch.arange(depth) % 4 < 2).float()
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    x = torch.stack([5.0 * (first * is_first + second * (1 - is_first)) for first, second in signs]).repeat(10, 1)
    columns = [15 * ((1 + first) / 2 * is_first + (1 + second) / 2 * (1 - is_first)) for first, second in signs]
    values = torch.stack(columns).repeat(10, 1).to(torch.uint8)
    zero_points = torch.tensor([0, 15], dtype=torch.uint8).repeat(40, depth // 64) if zeros else None
    weight = Int4Weight(values, torch.ones(40, depth // 32), zero_points, 32)
    packed = compiled.pack_linear(weight)
    for first in range(0, 40, rows):
        some = x[first : first + rows]
        assert torch.equal(compiled.linear(some, packed), reference(some, weight))


@pytest.mark.parametrize("rows", [6, 40])
def test_int4_product_handles_zero_tiny_and_non_finite_rows(kernels, generator, rows):
    x = random(generator, rows, 70)
    x[1] = 0
    x[2] *= 1e-35
    x[3, 5] = torch.nan
    x[4, 69] = torch.inf
    weight = weight_of(generator, 33, 70, 32)
    result = kernels.linear(x, kernels.pack_linear(weight))
    assert_same_bits(result, reference(x, weight))
    assert result.isnan().all(dim=1).nonzero().flatten().tolist() == [3, 4]
    assert torch.equal(result.isnan().any(dim=1), result.isnan().all(dim=1))
    assert not result[1:3].any()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(("depth", "width", "group_size"), [(896, 160, 128), (4864, 96, 32), (123, 33, 32)])
def test_int4_row_is_independent_of_batch_rows(compiled, generator, depth, width, group_size, zeros):
    weight = weight_of(generator, width, depth, group_size, zeros=zeros)
    packed = compiled.pack_linear(weight, random(generator, width))
    x = random(generator, 130, depth, dtype=torch.bfloat16)
    x[0] *= 3
    alone = torch.cat([compiled.linear(x[i : i + 1], packed, float32_out=True) for i in range(130)])
    for rows in (*range(2, 16), 24, 25, 36, 37, 130):
        assert torch.equal(compiled.linear(x[:rows], packed, float32_out=True), alone[:rows]), rows
    assert torch.equal(compiled.linear(x[97:], packed, float32_out=True), alone[97:])


@pytest.mark.parametrize("isa", ISAS)
def test_int4_product_bits_are_independent_of_threads(isa, generator):
    weight, x = weight_of(generator, 300, 200, 32), random(generator, 40, 200)
    results = [k.linear(x, k.pack_linear(weight)) for k in (compiled_kernels(isa), compiled_kernels(isa, 1))]
    assert torch.equal(*results)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("group_size", [32, 96])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("depth", [64, 70, 96, 130])
def test_int4_product_accesses_no_memory_out_of_bounds(compiled, generator, depth, rows, zeros, group_size):
    weight = weight_of(generator, 33, depth, group_size, zeros=zeros)
    x, expected = random(generator, rows, depth), None
    with memory_before_a_guard() as allocate:
        compiled.allocate = allocate
        try:
            packed = compiled.pack_linear(weight)
        finally:
            del compiled.allocate
        memory = torch.full((rows + 20, 33), 7.0)
        compiled.linear(x, packed, out=memory[:rows])
        expected = reference(x, weight)
        del packed
    assert torch.equal(memory[:rows], expected)
    assert (memory[rows:] == 7).all()


@contextlib.contextmanager
def memory_before_a_guard():
    """Return a function that allocates memory right before a page that must not be read or written."""
    size = 16 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    guard = ctypes.c_void_p(whole.data_ptr() + size)
    assert protect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    try:
        yield lambda num_bytes: whole[size - num_bytes : size]
    finally:
        assert protect(guard, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("rows", [6, 40])
def test_int4_product_accepts_strided_and_zero_rows(kernels, generator, rows):
    x, weight = random(generator, rows, 200)[:, 50:150], weight_of(generator, 40, 100, 32)
    packed = kernels.pack_linear(weight)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x.contiguous(), packed))
    assert kernels.linear(x[:0], packed).shape == (0, 40)


def rows_of(weight, ids, dtype):
    """Return the embedding rows of the weight: whole numbers of 16 bits times the row's unit, in float32."""
    whole, units = weight.whole_values()
    return (whole.float() * units.unsqueeze(1))[ids].to(dtype)


@pytest.mark.sweep(32)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (44, 32), (123, 77), (128, 33), (257, 40), (300, 100)])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_int4_embedding_equals_integer_values_times_units(
    kernels, generator, out_dtype, depth, width, group_size, zeros
):
    weight = weight_of(generator, width, depth, group_size, zeros=zeros)
    ids = torch.cat([torch.randperm(width, generator=generator), torch.tensor([width - 1, 0, 0])])
    packed = kernels.pack_linear(weight)
    rows = kernels.embedding(ids, packed, out_dtype)
    assert torch.equal(rows, rows_of(weight, ids, out_dtype))
    assert_same_bits(rows, ReferenceKernels().embedding(ids, ReferenceKernels().pack_linear(weight), out_dtype))
    assert kernels.embedding(ids[:0], packed, out_dtype).shape == (0, depth)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_int4_embedding_is_close_to_dequantized_weight(kernels, generator, zeros):
    """Scales have an error of at most half a unit, and values differ from their zero points by at most 16."""
    weight, ids = weight_of(generator, 70, 200, 32, zeros=zeros), torch.arange(70)
    rows = kernels.embedding(ids, kernels.pack_linear(weight), torch.float32)
    _, units = weight.whole_scales()
    assert ((rows - weight.dequantize()).abs() <= 16 * 0.501 * units.unsqueeze(1)).all()


def test_int4_embedding_handles_zero_large_and_non_finite_rows(kernels, generator):
    weight = weight_of(generator, 40, 100, 32, torch.float32)
    weight.scales[3] = 0
    weight.scales[4] *= 1e-35
    weight.scales[5] *= 1e30
    weight.scales[35, 2] = torch.nan
    weight.scales[36, 3] = torch.inf
    ids = torch.arange(40)
    rows = kernels.embedding(ids, kernels.pack_linear(weight), torch.float32)
    assert_same_bits(rows, rows_of(weight, ids, torch.float32))
    assert rows.isnan().all(dim=1).nonzero().flatten().tolist() == [35, 36]
    assert torch.equal(rows.isnan().any(dim=1), rows.isnan().all(dim=1))
    assert not rows[3:5].any()


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_int4_embedding_refuses_ids_outside_vocabulary(compiled, generator, zeros):
    """This includes the ids of the panel's padding."""
    packed = compiled.pack_linear(weight_of(generator, 33, 64, 32, zeros=zeros))
    for bad in (33, 63, 64, -1):
        with pytest.raises(IndexError, match="vocabulary"):
            compiled.embedding(torch.tensor([0, bad]), packed, torch.float32)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("depth", [33, 64, 70, 130])
def test_int4_embedding_accesses_no_memory_out_of_bounds(compiled, generator, depth, zeros, out_dtype, monkeypatch):
    weight, ids = weight_of(generator, 33, depth, 64, zeros=zeros), torch.arange(33)
    with memory_before_a_guard() as allocate, memory_before_a_guard() as allocate_rows:

        def empty(*shape, dtype):
            return allocate_rows(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        compiled.allocate = allocate
        try:
            packed = compiled.pack_linear(weight)
        finally:
            del compiled.allocate
        monkeypatch.setattr(compiled, "_empty", empty)
        rows = compiled.embedding(ids, packed, out_dtype).clone()
        last = compiled.embedding(ids[-1:], packed, out_dtype).clone()
        del packed
    assert torch.equal(rows, rows_of(weight, ids, out_dtype))
    assert torch.equal(last, rows[-1:])


def test_quantize_int4_is_exact_for_sixteen_values():
    values = torch.arange(-8.0, 8.0).repeat(4)
    weight = torch.stack([values * 0.25, values * -3, torch.zeros(64)])
    weight[2, 7] = torch.nan
    rounded = quantize_int4(weight)
    assert rounded.zeros is None
    assert torch.equal(rounded.dequantize()[:2], weight[:2])
    assert not rounded.dequantize()[2].any()


def test_quantize_int4_chooses_scale_of_least_error(generator):
    weight = random(generator, 64, 256)
    rounded = quantize_int4(weight)
    groups, best = weight.view(64, 8, 32), rounded.dequantize().view(64, 8, 32)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    for share in (1.0, 0.92, 0.84, 0.76):
        scale = (extreme * -share / 8).bfloat16().float()
        plain = ((groups / scale).round() + 8).clamp(0, 15)
        errors = ((plain - 8) * scale - groups).square().sum(dim=2)
        assert ((best - groups).square().sum(dim=2) <= errors * 1.001).all()
    largest_only = ((groups / (extreme / -8)).round().clamp(-8, 7) * (extreme / -8) - groups).square().sum()
    assert (best - groups).square().sum() < 0.97 * largest_only


def test_int4_num_bytes_counts_padded_panels(fastest, generator):
    assert fastest.pack_linear(weight_of(generator, 33, 70, 32, zeros=False)).num_bytes == 64 * (36 + 3 * 2 + 4)
    assert fastest.pack_linear(weight_of(generator, 33, 70, 32)).num_bytes == 64 * (36 + 3 * 4 + 4)
