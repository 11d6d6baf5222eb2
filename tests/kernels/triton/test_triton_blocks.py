"""Products with weights in GGUF's blocks: the bits of the reference, whatever the rows around, and what is stored."""

import pytest
import torch
from broken_kernels import broken

from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.interface import PackedLinear
from octavo.kernels.quantization import linear_blocks
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.packed_blocks import pack_blocks
from octavo.kernels.triton.quantized_rows import quantize_groups

# The interpreter computes with numpy, which warns of what is meant: infinities, and numbers that are none.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def rows_of(generator, count, width, dtype=torch.float32):
    return (torch.randn(count, width, generator=generator) * 4).to(dtype)


def equal(result, expected):
    """Bit for bit, NaN where NaN is."""
    return torch.equal(result.nan_to_num(1e30), expected.nan_to_num(1e30)) and result.dtype == expected.dtype


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", BlockKind, ids=lambda kind: kind.name)
def test_the_bits_of_the_reference(kernels, generator, kind):
    """Of few rows and of many, whose tiles have other shapes; some of a group of zeros, or with what is no number."""
    width = 3 * kind.block_values  # an odd number of groups where blocks are narrow
    weight, bias = random_blocks(generator, kind, 21, width), torch.randn(21, generator=generator)
    x = rows_of(generator, 18, width, torch.bfloat16)
    x[1, :32], x[2, 40], x[3, 0] = 0.0, torch.inf, torch.nan
    packed, plain = kernels.pack_linear([weight], bias), ReferenceKernels()
    expected = plain.linear(x, plain.pack_linear([weight], bias), float32_out=True)
    assert equal(kernels.linear(x, packed, float32_out=True), expected)
    assert equal(kernels.linear(x[:5], packed), expected[:5].bfloat16())
    assert expected[[2, 3]].isnan().any()
    assert expected[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize("kind", BlockKind, ids=lambda kind: kind.name)
def test_what_is_stored(kernels, generator, kind):
    """Rows as numbers, in the bytes that were planned."""
    weight = random_blocks(generator, kind, 40, 512)
    packed = kernels.pack_linear([weight])
    assert packed.num_bytes == weight.nbytes
    ids = torch.tensor([39, 0, 7])
    assert torch.equal(kernels.embedding(ids, packed, torch.float32), weight.dequantize()[ids])
    assert torch.equal(kernels.embedding(ids, packed, torch.bfloat16, 3.0), (weight.dequantize()[ids] * 3.0).bfloat16())
    odd = random_blocks(generator, kind, 3, 3 * kind.block_values)
    (part,) = pack_blocks([odd])
    assert torch.equal(part.rows(torch.arange(3)), odd.dequantize())


def test_exponents_of_every_size(kernels, generator):
    """MXFP4 has scales down to numbers below the normal ones of float32."""
    weight = random_blocks(generator, BlockKind.MXFP4, 255, 32)
    weight.rows[:, 0] = torch.arange(255, dtype=torch.uint8)
    x = rows_of(generator, 2, 32)
    packed = kernels.pack_linear([weight])
    assert equal(kernels.linear(x, packed), linear_blocks(x, weight))
    assert torch.equal(packed.storage[0].rows(torch.arange(255)), weight.dequantize())


def test_parts_of_several_kinds(kernels, generator):
    kinds = [BlockKind.Q4_K, BlockKind.Q4_K, BlockKind.Q6_K]
    weights = [random_blocks(generator, kind, size, 256) for kind, size in zip(kinds, (18, 3, 5), strict=True)]
    bias, x = torch.randn(26, generator=generator), rows_of(generator, 3, 256)
    packed = kernels.pack_linear(weights, bias)
    assert len(packed.storage) == 2
    out = torch.empty(3, 26)
    assert kernels.linear(x, packed, out=out) is out
    assert equal(out, torch.cat([linear_blocks(x, weight) for weight in weights], dim=1) + bias)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_in_groups(generator, num_rows):
    """A row's neighbours leave no trace, and all that is said of a group is of that one."""
    x = rows_of(generator, num_rows, 35 * 32)[:, : 34 * 32]  # more groups than a program takes
    values, scales, sums = quantize_groups(x)
    grouped = values.view(num_rows, 34, 32)
    assert (grouped.abs().amax(dim=2) == 127).all()
    assert torch.equal(sums.T, grouped.float().sum(dim=2))
    assert torch.allclose(grouped * scales.T.unsqueeze(2), x.reshape(num_rows, 34, 32), atol=scales.max().item() * 0.51)
    assert torch.equal(quantize_groups(x[-1:])[0], values[-1:])


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("Q4_0", "(group % 2 * 4)", "((group + 1) % 2 * 4)"),
        ("Q5_1", "group // of_byte * GROUP", "group // (of_byte * 2) * GROUP"),
        ("Q5_1", "term += x_sum[:, None] * minimum[None, :]", "term -= x_sum[:, None] * minimum[None, :]"),
        (
            "Q6_K",
            "(wide_column * num_groups + group) * SUBGROUPS + part",
            "(wide_column * num_groups + group) * SUBGROUPS",
        ),
        ("Q4_K", "group // SUPER_GROUPS\n", "(group + 1) // SUPER_GROUPS\n"),
        ("Q8_0", "range(loop_bound(num_groups))", "range(1, loop_bound(num_groups))"),
        ("Q8_0", "range(loop_bound(num_groups))", "range(loop_bound(num_groups - 1), -1, -1)"),
        ("MXFP4", "(2 + (size & 1))", "(2 + size)"),
    ],
)
def test_what_is_broken_is_caught(generator, tmp_path, kind, old, new):
    weight = random_blocks(generator, BlockKind[kind], 3, 512)
    x, (part,) = rows_of(generator, 2, 512), pack_blocks([weight])
    out = torch.empty(2, 3)
    broken(tmp_path, "matmul_blocks", old, new).matmul_blocks(quantize_groups(x), part, None, out)
    assert not torch.equal(out, linear_blocks(x, weight))


def test_others_see_no_more_than_its_size(kernels, generator):
    packed = kernels.pack_linear([random_blocks(generator, BlockKind.Q5_K, 6, 256)])
    assert isinstance(packed, PackedLinear)
    assert (packed.out_features, packed.in_features) == (6, 256)
