"""Products by heads have the bits of a product with each head's weight alone."""

import pytest
import torch
from broken_kernels import broken
from triton_interpreter import partition

from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.matmul import BLOCK_M

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PARTITION = partition()


def make(generator, num_rows, width, columns, dtype, num_heads=3):
    """Return heads with gaps between tokens and heads, and weights."""
    x = torch.randn(num_rows, num_heads, width + 8, generator=generator).to(dtype)[..., :width]
    return x, torch.randn(num_heads, columns, width, generator=generator).to(dtype)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "columns"), [(16, 130), (PARTITION + 5, 3)])
@pytest.mark.parametrize("num_rows", [0, 1, BLOCK_M + 1])
def test_head_product_has_bits_of_product_with_weight_of_head(kernels, generator, num_rows, width, columns, dtype):
    x, weights = make(generator, num_rows, width, columns, dtype)
    packed = kernels.pack_groups([kernels.pack_linear(each) for each in weights])
    wide = torch.zeros(num_rows, 3, columns + 5, dtype=dtype)
    found = kernels.head_linear(x, packed, wide[..., :columns])
    assert not wide[..., columns:].any()
    assert torch.equal(kernels.head_linear(x, packed), found)
    for head, weight in enumerate(weights):
        assert torch.equal(found[:, head], kernels.linear(x[:, head].contiguous(), kernels.pack_linear(weight)))


def test_head_product_is_close_to_plain_torch(kernels, generator):
    x, weights = make(generator, 5, 96, 40, torch.float32)
    reference = ReferenceKernels()
    found, expected = (
        some.head_linear(x, some.pack_groups([some.pack_linear(each) for each in weights]))
        for some in (kernels, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x_ptr + head * x_head_stride", "x_ptr"),
        ("weight_ptr + head * num_columns * WIDTH", "weight_ptr"),
        ("out_ptr + head * out_head_stride", "out_ptr + head * out_stride"),
        ("[:, None] * out_stride", "[:, None] * num_columns"),
        ("(row < num_rows)[:, None]", "(row <= num_rows)[:, None]"),
        ("range(1, tl.cdiv(WIDTH, PARTITION))", "range(2, tl.cdiv(WIDTH, PARTITION))"),
    ],
)
def test_broken_head_product_is_detected(generator, tmp_path, right, wrong):
    x, weights = make(generator, 5, PARTITION + 9, 7, torch.float32)
    expected = torch.einsum("thi,hoi->tho", x, weights)
    module = broken(tmp_path, "head_matmul", right, wrong)
    outputs = torch.full((7, 4, 9), torch.nan)
    module.head_matmul(x, weights, outputs[:5, :3, :7])
    is_right = torch.allclose(outputs[:5, :3, :7], expected, atol=1e-3)
    assert not (is_right and bool(outputs[5:].isnan().all()))
