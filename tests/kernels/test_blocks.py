"""Weights in GGUF blocks times int8 activations in groups of 32: the same bits on every backend, for every kind."""

from dataclasses import replace

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels
from test_int4 import memory_before_a_guard
from test_quantized import assert_same_bits, random

from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.reference import ReferenceKernels

KINDS = list(BlockKind)
FLOATS = [torch.float32, torch.bfloat16]


def depth_of(kind, depth):
    """Return the smallest depth of whole blocks that is at least `depth`."""
    return -(-depth // kind.block_values) * kind.block_values


def reference(x, weights, bias=None, **options):
    return ReferenceKernels().linear(x, ReferenceKernels().pack_linear(weights, bias), **options)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("shape", [(1, 32, 1), (1, 544, 160), (2, 96, 37), (9, 544, 33), (70, 288, 65)], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_product_has_bits_of_reference_on_every_isa(compiled, generator, kind, x_dtype, shape):
    rows, depth, width = shape
    depth = depth_of(kind, depth)
    x = random(generator, rows, depth, dtype=x_dtype) * 10
    weights, bias = [random_blocks(generator, kind, width, depth)], random(generator, width)
    for biases in (bias, None):
        packed = compiled.pack_linear(weights, biases)
        for float32_out in (True, False):
            result = compiled.linear(x, packed, float32_out=float32_out)
            assert_same_bits(result, reference(x, weights, biases, float32_out=float32_out))


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_reference_product_is_close_to_dequantized_product(generator, kind):
    x, weight = random(generator, 20, 512), random_blocks(generator, kind, 50, 512)
    exact = x.double() @ weight.dequantize().double().T
    error = (reference(x, [weight]).double() - exact).norm() / exact.norm()
    assert error < 0.01  # the rounding of activations


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_row_is_independent_of_batch_rows(compiled, generator, kind):
    packed = compiled.pack_linear([random_blocks(generator, kind, 96, 256)], random(generator, 96))
    x = random(generator, 70, 256, dtype=torch.bfloat16)
    x[0] *= 3
    alone = torch.cat([compiled.linear(x[i : i + 1], packed, float32_out=True) for i in range(70)])
    for rows in (*range(2, 16), 24, 25, 37, 70):
        assert torch.equal(compiled.linear(x[:rows], packed, float32_out=True), alone[:rows]), rows
    assert torch.equal(compiled.linear(x[57:], packed, float32_out=True), alone[57:])


@pytest.mark.turn(12)
@pytest.mark.parametrize("rows", [1, 40])
def test_gguf_product_over_cache_sized_row_blocks_has_reference_bits(fastest, generator, rows):
    """Rows are divided into blocks that fit into a cache."""
    weights = [random_blocks(generator, BlockKind.Q4_K, 33, 65536)]
    x = random(generator, rows, 65536)
    assert torch.equal(fastest.linear(x, fastest.pack_linear(weights)), reference(x, weights))


@pytest.mark.parametrize("isa", ISAS)
def test_gguf_product_bits_are_independent_of_threads(isa, generator):
    weights, x = [random_blocks(generator, BlockKind.Q5_K, 300, 256)], random(generator, 40, 256)
    for rows in (1, 40):
        results = [
            k.linear(x[:rows], k.pack_linear(weights)) for k in (compiled_kernels(isa), compiled_kernels(isa, 1))
        ]
        assert torch.equal(*results)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_gguf_sums_do_not_overflow(compiled, kind, rows):
    """All bytes of the values are the same; activations have one sign or both."""
    generator = torch.Generator().manual_seed(1)
    x = torch.full((6, 256), 5.0)
    x[1] = -5.0
    x[2, ::2] = -5.0
    x[3, ::2] = 0.0
    for byte in (0x00, 0xFF, 0x0F, 0xF0, 0x7F, 0x80, 0x81):
        weight = random_blocks(generator, kind, 33, 256)
        heads = {BlockKind.Q6_K: slice(192, 210)}.get(kind, slice(0, 16 if kind.block_values == 256 else 4))
        if kind is BlockKind.MXFP4:
            heads = slice(0, 1)
        blocks = weight.rows.view(-1, kind.block_bytes)
        kept = blocks[:, heads].clone()
        blocks.fill_(byte)
        blocks[:, heads] = kept
        for first in range(0, 6, rows):
            some = x[first : first + rows]
            assert torch.equal(compiled.linear(some, compiled.pack_linear([weight])), reference(some, [weight]))


@pytest.mark.parametrize("rows", [1, 40])
def test_gguf_product_handles_zero_tiny_and_non_finite_rows(kernels, generator, rows):
    x = random(generator, 40, 256)
    x[1] = 0
    x[2] *= 1e-35
    x[3, 5] = torch.nan
    x[4, 255] = torch.inf
    weights = [random_blocks(generator, BlockKind.Q4_1, 33, 256)]
    packed = kernels.pack_linear(weights)
    result = torch.cat([kernels.linear(some, packed) for some in x.split(rows)])
    assert_same_bits(result, reference(x, weights))
    assert result.isnan().all(dim=1).nonzero().flatten().tolist() == [3, 4]
    assert torch.equal(result.isnan().any(dim=1), result.isnan().all(dim=1))
    assert not result[1:3].any()


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_mixed_gguf_kinds_are_packed_into_one_product(kernels, generator, rows):
    widths = [(BlockKind.Q4_K, 64), (BlockKind.Q4_K, 33), (BlockKind.Q6_K, 33), (BlockKind.Q8_0, 5)]
    weights = [random_blocks(generator, kind, width, 512) for kind, width in widths]
    x, bias = random(generator, rows, 512, dtype=torch.bfloat16), random(generator, 135)
    packed = kernels.pack_linear(weights, bias)
    assert (packed.out_features, packed.in_features) == (135, 512)
    expected = [reference(x, [w], b) for w, b in zip(weights, bias.split([64, 33, 33, 5]), strict=True)]
    assert_same_bits(kernels.linear(x, packed), torch.cat(expected, dim=1))
    gates = kernels.pack_linear([weights[0], random_blocks(generator, BlockKind.Q5_0, 64, 512)])
    assert torch.equal(kernels.gated_linear(x, gates), kernels.gate(kernels.linear(x, gates), "silu"))


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_embedding_returns_dequantized_rows(kernels, generator, kind, out_dtype):
    weight = random_blocks(generator, kind, 77, depth_of(kind, 96))
    ids = torch.cat([torch.randperm(77, generator=generator), torch.tensor([76, 0, 0])])
    packed = kernels.pack_linear([weight])
    assert_same_bits(kernels.embedding(ids, packed, out_dtype), weight.dequantize()[ids].to(out_dtype))
    scaled = (weight.dequantize()[ids] * 3.7).to(out_dtype)
    assert_same_bits(kernels.embedding(ids, packed, out_dtype, 3.7), scaled)
    assert kernels.embedding(ids[:0], packed, out_dtype).shape == (0, weight.in_features)


def test_every_mxfp4_exponent_is_embedded_exactly(kernels, generator):
    weight = random_blocks(generator, BlockKind.MXFP4, 256, 32)
    weight.rows[:, 0] = torch.arange(256)
    rows = kernels.embedding(torch.arange(256), kernels.pack_linear([weight]), torch.float32)
    assert_same_bits(rows, weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_gguf_weight_is_little_larger_than_file(fastest, generator, kind):
    weight = random_blocks(generator, kind, 96, 512)
    assert fastest.pack_linear([weight]).num_bytes == weight.nbytes
    assert weight.rows.nbytes <= weight.nbytes <= 1.03 * weight.rows.nbytes


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_product_accesses_no_memory_out_of_bounds(compiled, generator, kind, rows):
    weights = [random_blocks(generator, kind, 33, 256)]
    x = random(generator, rows, 256)
    with memory_before_a_guard() as allocate:
        compiled.allocate = allocate
        try:
            packed = compiled.pack_linear(weights)
        finally:
            del compiled.allocate
        memory = torch.full((rows + 20, 33), 7.0)
        compiled.linear(x, packed, out=memory[:rows])
        embedded = compiled.embedding(torch.tensor([0, 32]), packed, torch.float32)
        del packed
    assert torch.equal(memory[:rows], reference(x, weights))
    assert (memory[rows:] == 7).all()
    assert torch.equal(embedded, weights[0].dequantize()[[0, 32]])


def test_packed_gguf_weight_keeps_no_reference_to_file_rows(fastest, generator):
    """Rows may be views, and the packed weight keeps no reference to them."""
    weight = random_blocks(generator, BlockKind.Q4_K, 128, 256)
    packed = fastest.pack_linear([weight.select_rows(slice(32, 96)), weight.select_rows(slice(96, 128))])
    expected = weight.dequantize()[32:]
    weight.rows.zero_()
    assert torch.equal(fastest.embedding(torch.arange(96), packed, torch.float32), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_rows_are_packed_and_released_in_parts(compiled, generator, kind, monkeypatch):
    weight, forgotten = random_blocks(generator, kind, 200, 256), []
    whole = compiled.pack_linear([weight]).storage.panels[0].data
    monkeypatch.setattr("octavo.kernels.block_panels._BYTES_AT_ONCE", 40 * kind.row_bytes(256))
    in_parts = compiled.pack_linear([replace(weight, forget=forgotten.append)]).storage.panels[0].data
    assert torch.equal(in_parts, whole)
    assert [len(rows) for rows in forgotten] == [32] * 6 + [8]
    assert torch.equal(torch.cat(forgotten), weight.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_gguf_weight_restores_equal_on_other_isa(compiled, fastest, generator, kind):
    """It does not depend on the instruction set that packed it; with parts of two kinds, each with its bias."""
    other = BlockKind.Q8_0 if kind is not BlockKind.Q8_0 else BlockKind.Q6_K
    weights = [random_blocks(generator, kind, 64, 256), random_blocks(generator, other, 33, 256)]
    x, bias = random(generator, 3, 256), random(generator, 97)
    packed = compiled.pack_linear(weights, bias)
    kept = compiled.keep_linear(packed)
    assert len(kept) == 2
    restored = fastest.restore_linear(kept)
    assert (restored.out_features, restored.in_features, restored.num_bytes) == (97, 256, packed.num_bytes)
    assert torch.equal(fastest.linear(x, restored), compiled.linear(x, packed))
    vocabulary = fastest.restore_linear(compiled.keep_linear(compiled.pack_linear(weights[:1])))
    assert torch.equal(fastest.embedding(torch.arange(64), vocabulary, torch.float32), weights[0].dequantize())


@pytest.mark.parametrize(
    "changes",
    [
        {"out_features": 97}, {"out_features": -64}, {"out_features": 64.0}, {"out_features": 2**62},
        {"in_features": 0},
        {"in_features": 128, "out_features": 128}, {"in_features": "256"}, {"type": "Q9_0"}, {"type": 8},
        {"type": "Q5_K"}, {"type": "uint8"}, {"type": ""}, {"group_size": 32},
        {"group_size": -32}, {"has_zeros": 1}, {"has_order": 1},
    ],
    ids=str,
)  # fmt: skip
def test_restore_refuses_invalid_gguf_metadata(fastest, generator, changes):
    """128 x 128 has as many bytes, but its rows are not whole blocks."""
    (kept,) = fastest.keep_linear(fastest.pack_linear([random_blocks(generator, BlockKind.Q4_K, 64, 256)]))
    with pytest.raises(ValueError, match="packed weight"):
        fastest.restore_linear([replace(kept, numbers=kept.numbers | changes)])


def test_kept_weight_stores_its_type_name(fastest, generator):
    """So a file is never read as another kind, even if the order of the kinds changes."""
    weights = [random_blocks(generator, BlockKind.Q6_K, 64, 256)], [random_blocks(generator, BlockKind.Q8_0, 64, 256)]
    floats = random(generator, 64, 256)
    types = [part.numbers["type"] for w in (*weights, floats) for part in fastest.keep_linear(fastest.pack_linear(w))]
    assert types == ["Q6_K", "Q8_0", "float32"]


def test_restore_refuses_mismatched_parts(fastest, generator):
    (first,) = fastest.keep_linear(fastest.pack_linear([random_blocks(generator, BlockKind.Q4_K, 64, 256)]))
    (longer,) = fastest.keep_linear(fastest.pack_linear([random_blocks(generator, BlockKind.Q4_K, 64, 512)]))
    (floats,) = fastest.keep_linear(fastest.pack_linear(random(generator, 64, 256)))
    for parts in ([first, longer], [first, floats], [floats, floats], []):
        with pytest.raises(ValueError, match="parts are not a packed weight"):
            fastest.restore_linear(parts)
    with pytest.raises(ValueError, match="65 values are not a packed bias of 64"):
        fastest.restore_linear([replace(first, bias=torch.zeros(65))])
    with pytest.raises(ValueError, match="bytes are not a packed weight of 64 x 256"):
        fastest.restore_linear([replace(first, data=first.data[:-64])])
