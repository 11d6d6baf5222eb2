"""Products with weights in GGUF blocks: the bits of the reference for any neighbouring rows, and the stored bytes."""

import pytest
import torch
from broken_kernels import broken

from octavo.kernels.block_weight import BlockKind, BlockWeight, random_blocks
from octavo.kernels.quantization import linear_blocks, quantize_rows
from octavo.kernels.triton import packed_blocks
from octavo.kernels.triton.matmul_blocks import matmul_blocks
from octavo.kernels.triton.packed_blocks import PackedBlocks
from octavo.kernels.triton.quantized_rows import quantize_groups

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


# Bytes of a row that pad 96 columns; blocks of 256 have none.
PADDING = dict.fromkeys([kind.name for kind in BlockKind], 0)
PADDING |= {"Q4_0": 16, "Q4_1": 16, "MXFP4": 16, "Q5_0": 36, "Q5_1": 36, "Q6_K": 0}


def rows_of(generator, count, width, dtype=torch.float32):
    return (torch.randn(count, width, generator=generator) * 4).to(dtype)


def equal(result, expected):
    """Compare bits; NaN equals NaN."""
    is_nan, as_bits = expected.isnan(), torch.int32 if expected.dtype == torch.float32 else torch.int16
    if result.dtype != expected.dtype or not torch.equal(result.isnan(), is_nan):
        return False
    return torch.equal(result.view(as_bits)[~is_nan], expected.view(as_bits)[~is_nan])


def defined(x, weights, bias=None):
    """Return the result of `linear_blocks` on the CPU, on any device that the tests use."""
    with torch.device("cpu"):
        products = torch.cat([linear_blocks(x.cpu(), weight.to(torch.device("cpu"))) for weight in weights], dim=1)
    return (products if bias is None else products + bias.cpu()).to(x.device)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", BlockKind, ids=lambda kind: kind.name)
def test_triton_gguf_product_has_bits_of_reference(kernels, generator, kind):
    """Few and many rows use tiles of other shapes; some rows have a group of zeros, NaN or infinity."""
    width = 3 * kind.block_values  # an odd number of groups if blocks are narrow
    weight, bias = random_blocks(generator, kind, 21, width), torch.randn(21, generator=generator)
    x = rows_of(generator, 18, width, torch.bfloat16)
    x[1, :32], x[2, 40], x[3, 0], x[4, 32:64] = 0.0, torch.inf, torch.nan, -1e-33
    x[5] *= 2.0**120
    packed, expected = kernels.pack_linear([weight], bias), defined(x, [weight], bias)
    assert equal(kernels.linear(x, packed, float32_out=True), expected)
    assert equal(kernels.linear(x[:6], packed), expected[:6].bfloat16())
    assert expected[[2, 3]].isnan().all()
    assert expected[[0, 1, 4]].isfinite().all()
    assert kernels.linear(x[:0], packed).shape == (0, 21)


@pytest.mark.parametrize("kind", BlockKind, ids=lambda kind: kind.name)
def test_packed_triton_blocks_dequantize_exactly_in_planned_bytes(kernels, generator, kind):
    """Rows are dequantized correctly, and take the planned bytes."""
    weight = random_blocks(generator, kind, 40, 512)
    packed = kernels.pack_linear([weight])
    assert packed.num_bytes == weight.nbytes
    ids = torch.tensor([39, 0, 7])
    assert torch.equal(kernels.embedding(ids, packed, torch.float32), weight.dequantize()[ids])
    assert torch.equal(kernels.embedding(ids, packed, torch.bfloat16, 3.0), (weight.dequantize()[ids] * 3.0).bfloat16())
    assert kernels.embedding(ids[:0], packed, torch.float32).shape == (0, 512)
    odd = random_blocks(generator, kind, 3, 3 * kind.block_values)
    part = PackedBlocks.pack([odd])
    assert torch.equal(part.rows(torch.arange(3)), odd.dequantize())
    assert part.nbytes - odd.nbytes <= 3 * PADDING[kind.name]


def test_gguf_rows_are_packed_in_pieces_and_released(kernels, generator, monkeypatch):
    """Rows are packed in pieces into memory that is allocated first; then none of them is read again."""
    weight, forgotten, widened = random_blocks(generator, BlockKind.Q6_K, 40, 256), [], []
    weight = BlockWeight(weight.kind, weight.rows, 256, forgotten.append)
    numbers = BlockWeight.numbers

    def watched(some):
        widened.append(some.shape[0])
        return numbers(some)

    monkeypatch.setattr(BlockWeight, "numbers", watched)
    monkeypatch.setattr(packed_blocks, "_VALUES_AT_ONCE", 16 * 256)
    part = PackedBlocks.pack([weight, weight.select_rows(slice(0, 3))])
    assert widened == [1, 16, 16, 8, 3]  # the first one gives the size to allocate
    assert forgotten == [weight.rows]
    assert torch.equal(part.rows(torch.tensor([39, 42])), weight.dequantize()[[39, 2]])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "MXFP4"])
def test_gguf_embedding_in_graph_reads_current_ids(kernels, generator, kind):
    weight, ids, out = random_blocks(generator, BlockKind[kind], 9, 256), torch.tensor([8, 0]), torch.zeros(2, 256)
    packed = kernels.pack_linear([weight])
    replay = (
        type(kernels).graph_pool(ids.device).capture(lambda: out.copy_(kernels.embedding(ids, packed, torch.float32)))
    )
    ids.copy_(torch.tensor([3, 5]))
    replay()
    assert torch.equal(out, weight.dequantize()[[3, 5]])


def test_triton_handles_every_mxfp4_exponent(kernels, generator):
    """MXFP4 has scales down to subnormal numbers of float32."""
    weight = random_blocks(generator, BlockKind.MXFP4, 255, 32)
    weight.rows[:, 0] = torch.arange(255, dtype=torch.uint8)
    x = rows_of(generator, 2, 32)
    packed = kernels.pack_linear([weight])
    assert equal(kernels.linear(x, packed), defined(x, [weight]))
    assert torch.equal(packed.storage.vocabulary().rows(torch.arange(255)), weight.dequantize())


def test_triton_product_joins_parts_of_several_gguf_kinds(kernels, generator):
    kinds = [BlockKind.Q4_K, BlockKind.Q4_K, BlockKind.Q6_K]
    weights = [random_blocks(generator, kind, size, 256) for kind, size in zip(kinds, (18, 3, 5), strict=True)]
    bias, x = torch.randn(26, generator=generator), rows_of(generator, 3, 256)
    packed = kernels.pack_linear(weights, bias)
    assert len(packed.storage.parts) == 2
    out = torch.empty(3, 26)
    assert kernels.linear(x, packed, out=out) is out
    assert equal(out, defined(x, weights, bias))


def test_quantize_groups_equals_quantize_rows_per_group(generator):
    """More groups than one program takes; a row alone has the bits that it has among other rows."""
    x = rows_of(generator, 3, 35 * 32)[:, : 34 * 32]
    values, scales, sums = quantize_groups(x)
    whole, expected = quantize_rows(x.reshape(-1, 32))
    assert torch.equal(values.float(), whole.view(3, -1))
    assert torch.equal(scales.T.flatten(), expected)
    assert torch.equal(sums.T.flatten(), whole.sum(dim=1))
    alone = quantize_groups(x[1:2])
    assert torch.equal(alone[0], values[1:2])
    assert all(torch.equal(each[:, 0], among[:, 1]) for each, among in zip(alone[1:], (scales, sums), strict=True))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("Q4_0", "(bits >> (4 * half))", "(bits >> (4 - 4 * half))"),
        ("Q5_1", "pair // pairs_of_byte * GROUP", "pair // (2 * pairs_of_byte) * GROUP"),
        ("Q5_1", "term += x_sum", "term -= x_sum"),
        ("Q5_K", "(0.0 - minimum) * tl.load", "minimum * tl.load"),
        ("Q6_K", "place * SUBGROUPS + part", "place * SUBGROUPS"),
        ("Q4_K", "pair // (SUPER_GROUPS // 2)\n", "(pair + 1) // (SUPER_GROUPS // 2)\n"),
        ("Q8_0", "is_column & (group < num_groups)", "is_column & (group < num_groups - 1)"),
        ("Q8_0", "range(loop_bound(tl.cdiv(num_groups, 2)))", "range(loop_bound(tl.cdiv(num_groups, 2) - 1), -1, -1)"),
        ("MXFP4", "(2 + (size & 1))", "(2 + size)"),
    ],
)
def test_broken_gguf_kernel_is_detected(generator, tmp_path, kind, old, new):
    weight = random_blocks(generator, BlockKind[kind], 3, 512)
    x, part = rows_of(generator, 2, 512), PackedBlocks.pack([weight])
    expected, out = defined(x, [weight]), torch.empty(2, 3)
    assert equal(matmul_blocks(quantize_groups(x), part, None, out), expected)
    wrong = broken(tmp_path, "matmul_blocks", old, new).matmul_blocks(quantize_groups(x), part, None, out)
    assert not equal(wrong, expected)
