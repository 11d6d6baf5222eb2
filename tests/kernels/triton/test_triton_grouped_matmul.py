"""Products by groups have the bits of a product with each group's weight alone, for any rows in the other groups."""

import pytest
import torch
from broken_kernels import broken
from triton_interpreter import partition

from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.matmul import BLOCK_M

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PARTITION = partition()
COUNTS = [  # rows of each group
    [3],
    [0, 2, 0, 1],
    [BLOCK_M, BLOCK_M + 1, 5],
    [1, 0, 0, 2, 0, 0, 0],
    [0, 0],
]


def make(generator, counts, width, columns, dtype):
    """Return rows, weights, and the first row of each group."""
    x = torch.randn(sum(counts), width, generator=generator).to(dtype)
    weights = torch.randn(len(counts), columns, width, generator=generator).to(dtype)
    return x, weights, torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def of_plain_torch(x, weights, start):
    reference = ReferenceKernels()
    return reference.grouped_linear(x, groups_of(reference, weights), start)


def groups_of(kernels, weights):
    return kernels.pack_groups([kernels.pack_linear(each) for each in weights])


@pytest.mark.sweep(32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "columns"), [(16, 130), (PARTITION + 5, 3), (2 * PARTITION, 40)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_product_has_bits_of_single_group_products(kernels, generator, counts, width, columns, dtype):
    x, weights, start = make(generator, counts, width, columns, dtype)
    result = kernels.grouped_linear(x, groups_of(kernels, weights), start)
    assert (result.shape, result.dtype) == ((sum(counts), columns), dtype)
    for weight, first, end in zip(weights, start[:-1].tolist(), start[1:].tolist(), strict=True):
        if first < end:
            alone = kernels.linear(x[first:end], kernels.pack_linear(weight))
            assert torch.equal(result[first:end], alone)
            assert torch.equal(kernels.linear(x[first : first + 1], kernels.pack_linear(weight))[0], result[first])


def test_grouped_product_is_close_to_plain_torch(kernels, generator):
    x, weights, start = make(generator, [4, 0, 70], 96, 40, torch.float32)
    found = kernels.grouped_linear(x, groups_of(kernels, weights), start)
    torch.testing.assert_close(found, of_plain_torch(x, weights, start))


def test_grouped_product_accepts_strided_rows(kernels, generator):
    x, weights, start = make(generator, [2, 3], 48, 7, torch.float32)
    wide = torch.cat([x, x], dim=1)
    packed = groups_of(kernels, weights)
    assert torch.equal(kernels.grouped_linear(wide[:, :48], packed, start), kernels.grouped_linear(x, packed, start))


def test_grouped_product_reads_rows_at_sources(kernels, generator):
    x, weights, start = make(generator, [2, 0, BLOCK_M + 3], 48, 7, torch.bfloat16)
    sources, packed = torch.randint(9, (len(x),), generator=generator), groups_of(kernels, weights)
    found = kernels.grouped_linear(x[:9], packed, start, sources=sources)
    assert torch.equal(found, kernels.grouped_linear(x[sources], packed, start))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tiles_until <= row_tile", "tiles_until < row_tile"),
        ("tiles_before) * BLOCK_M", "tiles_before) * (BLOCK_M + 1)"),
        ("x_row, column, x_end, num_columns, x_stride, 0,", "x_row, column, x_end - 1, num_columns, x_stride, 0,"),
        ("(row < end)", "(row <= end)"),
        ("group.to(tl.int64) * num_columns", "0 * num_columns"),
    ],
)
def test_broken_grouped_product_is_detected(generator, tmp_path, right, wrong):
    """An extra row belongs to the next group, and its tile may be stored before that."""
    x, weights, start = make(generator, [BLOCK_M + 1, 2, 3], 24, 5, torch.float32)
    expected = of_plain_torch(x, weights, start)
    module = broken(tmp_path, "grouped_matmul", right, wrong)
    outputs = torch.full((len(x) + 1, 5), torch.nan)
    module.grouped_matmul(x, weights, start, outputs)
    is_right = torch.allclose(outputs[:-1], expected, atol=1e-4) and bool(outputs[-1].isnan().all())
    assert not is_right
