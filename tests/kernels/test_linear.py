"""linear, embedding and their packed weights."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import ISAS, compiled_kernels

from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.quantization import quantize_int4, quantize_int8

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [  # rows, in, out
    (1, 1, 1),
    (5, 123, 123),
    (3, 64, 33),
    (9, 257, 40),
    (33, 300, 70),
    (130, 520, 65),
    (1, 896, 160),
    (12, 4864, 96),  # the longest sums of a model of 0.5B
    (60, 4864, 48),
]


def random(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_linear_is_as_exact_as_torch(kernels, generator, x_dtype, weight_dtype, shape):
    rows, depth, width = shape
    x = random(generator, rows, depth, dtype=x_dtype)
    weight = random(generator, width, depth, dtype=weight_dtype)
    bias = random(generator, width, dtype=weight_dtype)
    packed = kernels.pack_linear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    wide = F.linear(x.float(), weight.float(), bias.float())
    assert_as_exact_as_torch(kernels.linear(x, packed, float32_out=True), wide, expected)
    assert_as_exact_as_torch(kernels.linear(x, packed), wide.to(x_dtype), expected)


def test_linear_accepts_strided_rows_without_bias(kernels, generator):
    x = random(generator, 6, 200)[:, 50:150]
    weight = random(generator, 40, 300)[:, 20:120]
    expected = x.double() @ weight.double().T
    result = kernels.linear(x, kernels.pack_linear(weight))
    assert_as_exact_as_torch(result, F.linear(x, weight), expected)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize("heights", [(64, 32, 40), (64, 33, 32), (7,)], ids=str)  # whole and partial panels, one part
@pytest.mark.parametrize("depth", [1, 31, 100, 256])
def test_weight_packed_from_parts_equals_whole_weight(kernels, generator, depth, heights, dtype):
    parts = [random(generator, height, 2 * depth, dtype=dtype)[:, :depth] for height in heights]
    bias, x = random(generator, sum(heights)), torch.eye(depth)
    packed = kernels.pack_linear(parts, bias)
    whole = kernels.pack_linear(torch.cat(parts), bias)
    assert (packed.out_features, packed.num_bytes) == (whole.out_features, whole.num_bytes)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, whole))
    assert torch.equal(kernels.linear(x, kernels.pack_linear(parts)), torch.cat(parts).T.float())


def test_linear_accepts_zero_rows(kernels):
    packed = kernels.pack_linear(torch.ones(3, 4))
    assert kernels.linear(torch.ones(0, 4), packed).shape == (0, 3)


def test_linear_writes_result_to_out_tensor(kernels, generator):
    x, packed = random(generator, 5, 64), kernels.pack_linear(random(generator, 40, 64))
    out = torch.full((5, 40), float("nan"))
    assert kernels.linear(x, packed, out=out) is out
    assert torch.equal(out, kernels.linear(x, packed))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("weight_dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize(("depth", "width"), [(896, 160), (4864, 96), (123, 33)])
def test_linear_row_is_independent_of_batch_rows(compiled, generator, weight_dtype, depth, width):
    packed = compiled.pack_linear(random(generator, width, depth, dtype=weight_dtype), random(generator, width))
    x = random(generator, 130, depth, dtype=torch.bfloat16)
    x[0] *= 3
    alone = torch.cat([compiled.linear(x[i : i + 1], packed, float32_out=True) for i in range(130)])
    for rows in (2, 3, 7, 8, 9, 12, 13, 16, 24, 25, 33, 130):
        assert torch.equal(compiled.linear(x[:rows], packed, float32_out=True), alone[:rows]), rows
    # The last rows too, because they are in other tiles.
    assert torch.equal(compiled.linear(x[97:], packed, float32_out=True), alone[97:])


@pytest.mark.sweep(32)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("width", [200, 1024])  # so wide that a task has several panels
@pytest.mark.parametrize("depth", [896, 1000, 4864])  # whole tiles, a partial last tile, long panels
def test_linear_row_is_independent_of_its_row_block(compiled, generator, depth, width, quantized):
    weight = random(generator, width, depth, dtype=torch.bfloat16)
    packed = compiled.pack_linear(quantize_int8(weight) if quantized else weight, random(generator, width))
    x = random(generator, 300, depth + 8, dtype=torch.bfloat16)[:, :depth]  # no row begins at a cache line
    whole = compiled.linear(x, packed)
    assert torch.equal(compiled.linear(x.contiguous(), packed), whole)
    for row in (0, 15, 16, 31, 32, 159, 160, 255, 256, 299):  # boundaries of tiles, of pairs of tiles and of blocks
        assert torch.equal(compiled.linear(x[row : row + 1], packed), whole[row : row + 1]), row
    for rows in (slice(17), slice(31, 95), slice(160, 290)):
        assert torch.equal(compiled.linear(x[rows], packed), whole[rows]), rows


STORED = {
    "bfloat16": torch.Tensor.bfloat16,
    "int8": quantize_int8,
    "int4": lambda weight: quantize_int4(weight, 32),
    "Q8_0": lambda weight: [random_blocks(torch.Generator().manual_seed(1), BlockKind.Q8_0, *weight.shape)],
    "Q4_K": lambda weight: [random_blocks(torch.Generator().manual_seed(1), BlockKind.Q4_K, *weight.shape)],
}
MOST_ROWS = 600
# Rows at which a kernel is chosen or rows are divided: whole tiles, pairs of tiles, blocks of rows, passes.
SPECIAL_ROWS = (1, 5, 16, 17, 32, 47, 48, 96, 97, 128, 192, 193, 256, 511, 512, 513, 600)


def assert_rows_do_not_depend_on_their_number(kernels, stored, counts):
    """Compare products of the first rows with the product of all rows; depth: several slices, the last not whole."""
    generator = torch.Generator().manual_seed(0)
    depth = 1280 if stored == "Q4_K" else 1056
    packed = kernels.pack_linear(STORED[stored](random(generator, 160, depth)), random(generator, 160))
    x = random(generator, MOST_ROWS, depth, dtype=torch.bfloat16)
    whole = kernels.linear(x, packed)
    for count in counts:
        assert torch.equal(kernels.linear(x[:count], packed), whole[:count]), count
        assert torch.equal(kernels.linear(x[-count:], packed), whole[-count:]), count


@pytest.mark.sweep(10)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("isa", ISAS)
def test_linear_rows_are_independent_of_number_of_rows(isa, stored, num_threads):
    assert_rows_do_not_depend_on_their_number(compiled_kernels(isa, num_threads=num_threads), stored, SPECIAL_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_linear_rows_are_independent_of_every_number_of_rows(isa, stored, num_threads):
    kernels = compiled_kernels(isa, num_threads=num_threads)
    assert_rows_do_not_depend_on_their_number(kernels, stored, range(1, MOST_ROWS + 1))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("rows", [513, 1300])
@pytest.mark.parametrize("depth", [1024, 3072])
def test_linear_bits_are_equal_for_more_rows_than_fit_cache(fastest, generator, depth, rows):
    """Some blocks of rows go through all panels before the rest, and the last block is smaller."""
    weight = random(generator, 192, depth, dtype=torch.bfloat16)
    x = random(generator, rows, depth, dtype=torch.bfloat16)
    for stored in (weight, quantize_int8(weight), quantize_int4(weight, 128)):
        packed = fastest.pack_linear(stored)
        for product in (fastest.linear, fastest.gated_linear):
            pieces = [product(x[first : first + 100], packed) for first in range(0, rows, 100)]
            assert torch.equal(product(x, packed), torch.cat(pieces))


@pytest.mark.sweep(12)
def test_linear_bits_are_equal_for_more_features_than_one_pack(compiled, generator):
    """More features than are packed at a time: the rest needs another pass."""
    depth = 40000
    weight, x = (
        random(generator, 40, depth, dtype=torch.bfloat16),
        random(generator, 300, depth + 8).bfloat16()[:, :depth],
    )
    for stored in (weight, quantize_int8(weight), quantize_int4(weight, 128)):
        packed = compiled.pack_linear(stored)
        for kind in (x, x.float()):
            whole = compiled.linear(kind, packed)
            alone = torch.cat([compiled.linear(kind[i : i + 1], packed) for i in (0, 255, 256, 299)])
            assert torch.equal(whole[[0, 255, 256, 299]], alone)


def test_grouped_linear_multiplies_rows_with_weight_of_their_group(fastest, generator):
    x, weights = random(generator, 9, 64), random(generator, 4, 33, 64)
    start = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32)
    groups = [0] * 4 + [2] + [3] * 4
    alone = [
        fastest.linear(row[None], fastest.pack_linear(weights[group])) for row, group in zip(x, groups, strict=True)
    ]
    packed = fastest.pack_groups([fastest.pack_linear(each) for each in weights])
    assert (packed.num_groups, packed.out_features, packed.in_features) == (4, 33, 64)
    assert torch.equal(fastest.grouped_linear(x, packed, start), torch.cat(alone))
    nobody = fastest.grouped_linear(x[:0], packed, torch.zeros(5, dtype=torch.int32))
    assert (nobody.shape, nobody.dtype) == ((0, 33), x.dtype)


@pytest.mark.turn(12)
@pytest.mark.parametrize("width", [896, 4864, 151936])
def test_wide_linear_row_is_independent_of_batch_rows(fastest, generator, width):
    few = (torch.rand(min(width, 1187), 896, generator=generator) - 0.5).to(torch.bfloat16)
    weight = few.repeat(-(-width // len(few)), 1)[:width]  # the same columns at other places, as tested here
    packed = fastest.pack_linear(weight)
    x = random(generator, 33, 896, dtype=torch.bfloat16)
    alone = fastest.linear(x[:1], packed, float32_out=True)
    for rows in (2, 8, 33):
        assert torch.equal(fastest.linear(x[:rows], packed, float32_out=True)[:1], alone), rows


@pytest.mark.sweep(12)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [333, 1056])  # so wide that a task has several panels
def test_linear_bits_are_independent_of_threads(compiled, generator, width, weight_dtype):
    weight, bias = random(generator, width, 500, dtype=weight_dtype), random(generator, width)
    sides = [(k, k.pack_linear(weight, bias)) for k in (compiled, compiled_kernels(compiled.isa, num_threads=1))]
    assert [k.num_threads for k, _ in sides] == [2, 1]
    for rows, dtype in [(rows, dtype) for rows in (1, 5, 100, 400) for dtype in FLOATS]:
        x = random(generator, rows, 500, dtype=dtype)
        assert torch.equal(*(k.linear(x, packed) for k, packed in sides)), (rows, dtype)


def test_linear_bits_are_equal_on_avx512_and_avx2(generator):
    weight, x = random(generator, 100, 900, dtype=torch.float16), random(generator, 40, 900)
    results = [k.linear(x, k.pack_linear(weight)) for k in map(compiled_kernels, ("avx512", "avx2"))]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_embedding_returns_weight_rows(kernels, generator, dtype, out_dtype):
    weight = random(generator, 77, 123, dtype=dtype)
    weight[3, 5] = float("inf")
    weight[4, 5] = 2.0**-24 if dtype == torch.float16 else 1e-40  # subnormal
    ids = torch.tensor([0, 76, 3, 4, 31, 32, 3])
    rows = kernels.embedding(ids, kernels.pack_linear(weight), out_dtype)
    assert torch.equal(rows, weight[ids].to(out_dtype))


def test_embedding_refuses_ids_outside_vocabulary(kernels):
    packed = kernels.pack_linear(torch.ones(3, 4))
    for bad in (3, -1):
        with pytest.raises(IndexError):
            kernels.embedding(torch.tensor([0, bad]), packed, torch.float32)


def test_linear_num_bytes_counts_padded_panels(fastest):
    packed = fastest.pack_linear(torch.ones(33, 5, dtype=torch.bfloat16), torch.ones(33))
    assert packed.num_bytes == 64 * 6 * 2 + 64 * 4
    assert (packed.out_features, packed.in_features) == (33, 5)
