"""Norms with a gate: errors, and the bits of a norm and a gate one after the other."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import ISAS, compiled_kernels

from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(7, 128, 128), (33, 384, 128), (5, 75, 25), (1, 4096, 4096), (4, 1000, 500)]  # rows, size, group_size
EPS = 1e-5


def make_arguments(rows, size, dtype, generator):
    x, gate = torch.randn(2, rows, size, generator=generator).to(dtype)
    return x, gate * 2


def normalize(kernels, x, gate, weight, group_size, *, gate_first):
    out = torch.empty(x.shape, dtype=x.dtype)
    gated_norm(kernels, x, gate, weight, EPS, group_size, gate_first, out)
    return out


def exact_norm(x, gate, weight, group_size, *, gate_first):
    x, factors = x.double(), F.silu(gate.double())
    x = (x * factors if gate_first else x).unflatten(1, (-1, group_size))
    normed = x / (x.square().mean(dim=2, keepdim=True) + EPS).sqrt() * weight.double().view(-1, group_size)
    return normed.flatten(1) * (1 if gate_first else factors)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("has_wide_weight", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_is_as_exact_as_torch(shape, dtype, has_wide_weight, gate_first, is_shared, compiled, generator):
    rows, size, group_size = shape
    x, gate = make_arguments(rows, size, dtype, generator)
    weight = torch.rand(group_size if is_shared else size, generator=generator) + 0.5
    weight = weight if has_wide_weight else weight.to(dtype)
    plain, found = (
        normalize(each, x, gate, weight, group_size, gate_first=gate_first) for each in (ReferenceKernels(), compiled)
    )
    assert_as_exact_as_torch(found, plain, exact_norm(x, gate, weight, group_size, gate_first=gate_first))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("size", "group_size"), [(384, 128), (75, 25)])
def test_float32_result_has_bits_of_norm_and_gate(size, group_size, isa, generator):
    kernels = compiled_kernels(isa)
    x, gate = make_arguments(19, size, torch.float32, generator)
    weight = torch.rand(group_size, generator=generator)
    normed = kernels.rms_norm(x.view(-1, group_size), weight, EPS).view(x.shape)
    after = kernels.gate(torch.cat([gate, normed], dim=1))
    assert torch.equal(normalize(kernels, x, gate, weight, group_size, gate_first=False), after)
    products = kernels.gate(torch.cat([gate, x], dim=1)).view(-1, group_size)
    before = kernels.rms_norm(products, weight, EPS).view(x.shape)
    assert torch.equal(normalize(kernels, x, gate, weight, group_size, gate_first=True), before)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_has_equal_bits_alone_and_as_slice_of_wider_rows(dtype, gate_first, compiled, generator):
    x, gate = make_arguments(50, 1000, dtype, generator)
    weight = torch.rand(1000, generator=generator)
    found = normalize(compiled, x, gate, weight, 500, gate_first=gate_first)
    for row in range(0, 50, 7):
        alone = normalize(compiled, x[row : row + 1], gate[row : row + 1], weight, 500, gate_first=gate_first)
        assert torch.equal(alone, found[row : row + 1])
    x, gate = torch.cat([x, gate], dim=1).split(1000, dim=1)
    assert torch.equal(normalize(compiled, x, gate, weight, 500, gate_first=gate_first), found)
    for num_threads in (1, 5):
        kernels = compiled_kernels(compiled.isa, num_threads)
        assert torch.equal(normalize(kernels, x, gate, weight, 500, gate_first=gate_first), found)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_result_is_rounded_once(dtype, gate_first, compiled, generator):
    x, gate = make_arguments(20, 384, dtype, generator)
    weight = torch.rand(128, generator=generator)
    wide = normalize(compiled, x.float(), gate.float(), weight, 128, gate_first=gate_first)
    assert torch.equal(normalize(compiled, x, gate, weight, 128, gate_first=gate_first), wide.to(dtype))


@pytest.mark.parametrize(
    ("x", "gate", "weight", "group_size", "message"),
    [
        (torch.zeros(2, 32), torch.zeros(2, 16), torch.zeros(16), 16, "gate has another shape"),
        (torch.zeros(2, 32), torch.zeros(2, 32), torch.zeros(8), 16, "whole groups"),
        (torch.zeros(2, 32), torch.zeros(2, 32), torch.zeros(12), 12, "whole groups"),
        (torch.zeros(2, 32), torch.zeros(2, 32).bfloat16(), torch.zeros(16), 16, "different dtypes"),
        (torch.zeros(2, 32).bfloat16(), torch.zeros(2, 32).bfloat16(), torch.zeros(16).half(), 16, "another dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x, gate, weight, group_size, message):
    with pytest.raises(ValueError, match=message):
        normalize(compiled_kernels("portable"), x, gate, weight, group_size, gate_first=False)
